"""Run a batch that gave a non-finite loss or gradient again, alone: `ratchet replay-batch FOLDER`.

The folder is what the warm-start's guard left (`tasks.warmstart.nan_guard`). The batch meets the
same weights under every attention kernel and number format, so that it shows whether the kernel,
the format or the batch itself is at fault. bfloat16 means autocast over float32 weights, as in
training. An OPD batch holds the completions that were sampled, so nothing is sampled again; its
loss is computed from all logits at once, not tile by tile as in training, and its teacher is loaded
from where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from ratchet.errors import UserError
from tasks.warmstart.teacher import fit_vocabulary

ATTENTIONS = ("sdpa", "eager")
DTYPES = ("bfloat16", "float32")
COLUMNS = {
    "sft": ("input_ids", "attention_mask", "labels"),
    "opd": ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"),
}
"""What the loss needs of a batch, by method."""


@dataclass(frozen=True)
class Replay:
    """A batch that was kept, and what it ran under."""

    about: dict[str, Any]
    batches: list[dict[str, torch.Tensor]]
    """Micro-batches."""
    model: Path

    @property
    def columns(self) -> tuple[str, ...]:
        """What the loss needs of a batch."""
        return COLUMNS[self.about["method"]]

    @property
    def num_completion_tokens(self) -> int:
        """Tokens with loss in an OPD replay."""
        return sum(int(batch["completion_mask"].sum()) for batch in self.batches)


@dataclass(frozen=True)
class Outcome:
    """What a batch gave under one kernel and number format."""

    attention: str
    dtype: str
    loss: float
    gradient_norm: float
    first_bad: str | None
    """The first weight, in the model's order, whose gradient isn't finite."""

    @property
    def ok(self) -> bool:
        """Whether everything was finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def read_replay(folder: Path) -> Replay:
    """A replay folder; UserError when it isn't one, or its batches lack what the loss needs."""
    path = folder / "batch.safetensors"
    if not path.is_file() or not (folder / "model").is_dir():
        raise UserError(f"{folder} holds no replay: name the folder that the error message named")
    batches: list[dict[str, torch.Tensor]] = []
    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("ratchet", "{}"))
        for name in sorted(file.keys(), key=lambda name: int(name.partition(".")[0])):
            index, _, column = name.partition(".")
            if int(index) == len(batches):
                batches.append({})
            batches[-1][column] = file.get_tensor(name)
    found = Replay(about, batches, folder / "model")
    missing = [name for batch in batches for name in found.columns if name not in batch]
    if missing:
        raise UserError(f"{path} lacks {missing[0]}: it can't be run again")
    return found


def outcomes(replay: Replay) -> Iterator[Outcome]:
    """The batch under every kernel and number format."""
    for attention in ATTENTIONS:
        for dtype in DTYPES:
            yield run_once(replay, attention, dtype)


def run_once(replay: Replay, attention: str, dtype: str) -> Outcome:
    """Loss and gradient norm of the batch under one kernel and number format."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter = (replay.model / "adapter_config.json").exists()
    load = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    options = {"is_trainable": True} if adapter else {}
    model = load.from_pretrained(
        replay.model, dtype=torch.float32, attn_implementation=attention, **options
    )
    model = model.to(device).train()
    autocast: AbstractContextManager[Any] = (
        torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()
    )
    teacher = (
        teacher_of(replay, model, attention).to(device) if replay.about["method"] == "opd" else None
    )
    losses = []
    for batch in replay.batches:
        inputs = {name: batch[name].to(device) for name in replay.columns}
        with autocast:
            if teacher is None:
                loss = model(**inputs).loss / len(replay.batches)
            else:
                loss = divergence(replay, model, teacher, inputs) / replay.num_completion_tokens
        loss.backward()
        losses.append(loss.item())
    graded = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([gradient for _, gradient in graded])
    bad = next((name for name, gradient in graded if not gradient.isfinite().all()), None)
    return Outcome(attention, dtype, sum(losses), float(norm), bad)


def teacher_of(replay: Replay, student: Any, attention: str) -> Any:
    """The teacher of an OPD run, in the run's number format, with as many rows as the student."""
    about = replay.about
    where = {} if Path(about["teacher"]).is_dir() else {"revision": about["teacher_revision"]}
    teacher = AutoModelForCausalLM.from_pretrained(
        about["teacher"],
        dtype=getattr(torch, about["dtype"]),
        attn_implementation=attention,
        **where,
    )
    have = teacher.config.get_text_config().vocab_size
    want = student.config.get_text_config().vocab_size
    fit_vocabulary(teacher, want, num_tokens=min(have, want))
    return teacher.eval()


def divergence(
    replay: Replay, student: Any, teacher: Any, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Sum over the completions' tokens of the divergence that OPD minimises, the generalised
    Jensen-Shannon divergence of https://arxiv.org/abs/2306.13649: KL(student, teacher) for
    `beta` = 1, KL(teacher, student) for 0."""
    beta, temperature = replay.about["beta"], replay.about["temperature"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].shape[1]

    def log_probs(model: Any) -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return (logits[:, -width - 1 : -1].float() / temperature).log_softmax(dim=-1)

    ours = log_probs(student)
    with torch.no_grad():
        theirs = log_probs(teacher)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.exp() * (p - q)).sum(dim=-1)

    if beta in (0, 1):
        per_token = kl(ours, theirs) if beta == 1 else kl(theirs, ours)
    else:
        weights = torch.tensor([beta, 1 - beta], device=ours.device).log()
        middle = torch.stack([theirs + weights[0], ours + weights[1]]).logsumexp(dim=0)
        per_token = beta * kl(theirs, middle) + (1 - beta) * kl(ours, middle)
    keep = batch["completion_mask"].bool()
    return per_token[keep].sum()


def diagnosis(found: list[Outcome]) -> str:
    """What the outcomes say, in a sentence or two."""
    good = [f"{one.attention} in {one.dtype}" for one in found if one.ok]
    if len(good) == len(found):
        return (
            "Finite everywhere: the batch is sound by itself. What was not finite came from "
            "outside it, such as other processes' gradients or another device."
        )
    if not good:
        return "Finite nowhere: the weights or the batch are at fault, not the kernel or format."
    bad = [f"{one.attention} in {one.dtype}" for one in found if not one.ok]
    return (
        f"Finite with {', '.join(good)}; not with {', '.join(bad)}: train with one of the former."
    )


def tell(folder: Path) -> None:
    """Run a replay and print its table."""
    replay = read_replay(folder)
    about = replay.about
    print(
        f"{about['what']} not finite at step {about['step']} of {about['method']}, attention "
        f"{about['attention']}, {about['dtype']}"
    )
    questions = [question for batch in about["question_ids"] for question in batch]
    print(f"questions {', '.join(questions)}\n")
    print(f"{'attention':<10} {'dtype':<9} {'loss':>10} {'gradient norm':>14}")
    found = []
    for one in outcomes(replay):
        found.append(one)
        bad = f"   first in {one.first_bad}" if one.first_bad else ""
        print(
            f"{one.attention:<10} {one.dtype:<9} {one.loss:>10.4f} {one.gradient_norm:>14.4f}{bad}",
            flush=True,
        )
    print(f"\n{diagnosis(found)}")
