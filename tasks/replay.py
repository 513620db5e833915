"""Run a batch that gave a non-finite loss or gradient again, alone: `ratchet replay-batch FOLDER`.

The folder is what the warm-start's guard left (`tasks.warmstart_guard`). The batch meets the same
weights under every attention kernel and number format, so that it shows whether the kernel, the
format or the batch itself is at fault. bfloat16 means autocast over float32 weights, as in
training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from ratchet.errors import EXIT_USER_ERROR, UserError

ATTENTIONS = ("sdpa", "eager")
DTYPES = ("bfloat16", "float32")
COLUMNS = ("input_ids", "attention_mask", "labels")
"""What a model needs of a batch to compute its loss."""


@dataclass(frozen=True)
class Replay:
    """A batch that was kept, and what it ran under."""

    about: dict[str, Any]
    batches: list[dict[str, torch.Tensor]]
    """Micro-batches."""
    model: Path


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
    """A replay folder; UserError when it isn't one, or holds no batch that can be run alone."""
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
    if not all(set(COLUMNS) <= batch.keys() for batch in batches):
        raise UserError(
            f"{folder} is of on-policy distillation, whose completions were sampled on the way and "
            "aren't in the batch: only SFT batches can be run again"
        )
    return Replay(about, batches, folder / "model")


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
    losses = []
    for batch in replay.batches:
        inputs = {name: batch[name].to(device) for name in COLUMNS}
        with autocast:
            loss = model(**inputs).loss / len(replay.batches)
        loss.backward()
        losses.append(loss.item())
    graded = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([gradient for _, gradient in graded])
    bad = next((name for name, gradient in graded if not gradient.isfinite().all()), None)
    return Outcome(attention, dtype, sum(losses), float(norm), bad)


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


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks.replay", description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        tell(parser.parse_args(arguments).folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
