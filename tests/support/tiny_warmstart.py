"""Runs a warm-start stage on a tiny random model and hand-made questions. Not a test module.

python -m tests.support.tiny_warmstart FOLDER STEP      (SFT, killed after STEP and run again by a
test)
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratchet.config.run import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
    SftConfig,
    WandbConfig,
    WarmstartConfig,
)
from ratchet.store.store import Store
from tasks.runtime.context import StageContext, StageResult
from tasks.stages import warmstart_opd, warmstart_sft
from tests.support.made_up import artifact, question
from tests.support.tiny_model import tiny_model, tiny_tokenizer

PROMPT = PromptConfig(format=PromptFormat.TAGS_SHORT)
SFT = SftConfig(epochs=2, learning_rate=1e-2, batch_size=4, micro_batch_size=2)
OPD = OpdConfig(steps=4, learning_rate=1e-2, batch_size=4, micro_batch_size=2)
SAMPLER = SamplerConfig(engine="transformers", max_completion_tokens=12)
Rows = list[dict[str, Any]]
Emit = Callable[[dict[str, Any]], None]


def questions(count: int = 10) -> Rows:
    """Sums with their reference solutions."""
    return [
        question(
            f"q{n}",
            role="train",
            question=f"What is {n} + 2?",
            gold=str(n + 2),
            reference_solution=f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
        )
        for n in range(count)
    ]


def with_dev(count: int = 2) -> Rows:
    """The same questions and as many held-out ones, the first longer than all others."""
    return questions() + [
        question(
            f"d{n}",
            role="dev",
            question=f"What is {n} + 3?" + (" Tell it." * 10 if n == 0 else ""),
            gold=str(n + 3),
        )
        for n in range(count)
    ]


def selection(rows: Rows, rl: int = 2) -> Rows:
    """The first `rl` questions go to RL, the others to the warm-up."""
    return [
        {
            "question_id": row["question_id"],
            "num_samples": 4,
            "pass_rate_lenient": 0.5 if n < rl else 0.0,
            "pass_rate_strict": 0.0,
            "bucket": "live" if n < rl else "always_wrong",
            "role": "rl" if n < rl else "warmup",
            "why": "made up",
        }
        for n, row in enumerate(rows)
    ]


def tiny_model_files(
    folder: Path, seed: int = 0, vocab_size: int | None = None, head_dim: int = 16
) -> Path:
    """Save a random model and its tokenizer; returns the checkpoint's folder."""
    tokenizer = tiny_tokenizer()
    checkpoint = folder / "checkpoint"
    model = tiny_model(tokenizer, seed=seed, vocab_size=vocab_size, head_dim=head_dim)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


def stage_context(
    folder: Path, rows: Rows | None = None, chosen: Rows | None = None, emit: Emit = print
) -> StageContext:
    """A context in `folder` with the tiny model, `rows` and a selection over those to train on.

    Called again for the same folder, it is the next attempt: inputs and `work` are as they were.
    """
    rows = questions() if rows is None else rows
    trained = [row for row in rows if row["role"] == "train"]
    tables = {"selection": selection(trained) if chosen is None else chosen}
    if not (folder / "model").exists():
        tiny_model_files(folder / "model")
    out, work = folder / "out", folder / "work"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    work.mkdir(exist_ok=True)
    return StageContext(
        node="warmstart",
        key="0123456789abcdef0123",
        run_id="test-run",
        seed=0,
        store=Store(folder / "store"),
        inputs={
            "model": artifact(folder / "model", "grpo", {}),
            "questions": artifact(folder / "questions", "questions", {"questions": rows}),
            "selection": artifact(folder / "selection", "filter", tables),
        },
        out_dir=out,
        work_dir=work,
        emit=emit,
    )


def run_sft(ctx: StageContext, sft: SftConfig = SFT, **sections: Any) -> StageResult:
    """The SFT stage with test defaults."""
    defaults: dict[str, Any] = {
        "model": ModelConfig(),
        "prompt": PROMPT,
        "sampler": SAMPLER,
        "warmstart": WarmstartConfig(method="sft"),
        "wandb": WandbConfig(),
    }
    return warmstart_sft.run(ctx, sft=sft, **(defaults | sections))


def run_opd(ctx: StageContext, opd: OpdConfig, **sections: Any) -> StageResult:
    """The OPD stage with test defaults."""
    defaults: dict[str, Any] = {
        "model": ModelConfig(),
        "prompt": PROMPT,
        "sampler": SAMPLER,
        "warmstart": WarmstartConfig(method="opd"),
        "wandb": WandbConfig(),
    }
    return warmstart_opd.run(ctx, opd=opd, **(defaults | sections))


def die_at(step: int) -> Emit:
    """An event sink that kills its process, as `kill -9` would, once `step` is done."""

    def emit(event: dict[str, Any]) -> None:
        if event.get("done") == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return emit


def main() -> None:
    """Run the SFT stage and die on the way."""
    folder, step = Path(sys.argv[1]), int(sys.argv[2])
    run_sft(stage_context(folder, with_dev(), emit=die_at(step)))


if __name__ == "__main__":
    main()
