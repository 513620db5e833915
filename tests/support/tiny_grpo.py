"""A GRPO stage small enough for a test, also as a process of its own that can be killed.

Not a test module. `python -m tests.support.tiny_grpo FOLDER MODEL ENGINE STEPS [KILL_AT]` runs the
stage in FOLDER and kills itself with SIGKILL after step KILL_AT. ENGINE may be `server`, vLLM in
one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.places import DATA
from ratchet.store.store import Artifact, Store
from tasks.runtime.context import StageContext, StageResult
from tests.conftest import REPO
from tests.support.made_up import artifact, question

SEEDLING = DATA / "seedling"
NUM_QUESTIONS = 6
GROUP_SIZE = 4


def letters(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within almost every group of a random model: share of letters."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


def inputs(folder: Path, model: Path) -> dict[str, Artifact]:
    """The artifacts that the stage reads; question 0 isn't selected for RL."""
    rows = [
        question(f"q{i}", question=f"What is {i} + 2?", gold=str(i + 2))
        for i in range(NUM_QUESTIONS + 1)
    ]
    selection = [
        {
            "question_id": row["question_id"],
            "num_samples": 8,
            "pass_rate_lenient": 0.5,
            "pass_rate_strict": 0.5,
            "bucket": "live",
            "role": "rl" if i else "dropped",
            "why": "made up",
        }
        for i, row in enumerate(rows)
    ]
    start = artifact(folder / "model", "warmstart_sft", {})
    checkpoint = folder / "model" / "checkpoint"
    if not checkpoint.exists():
        checkpoint.symlink_to(model)
    return {
        "model": start,
        "questions": artifact(folder / "questions", "questions", {"questions": rows}),
        "selection": artifact(folder / "selection", "filter", {"selection": selection}),
    }


def context(folder: Path, model: Path, seed: int = 3) -> StageContext:
    """A context in `folder` whose work folder survives from one call to the next."""
    out, work = folder / "out", folder / "work"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    return StageContext(
        node="grpo",
        key="0123456789abcdef0123",
        run_id="test-run",
        seed=seed,
        store=Store(folder / "store"),
        inputs=inputs(folder, model),
        out_dir=out,
        work_dir=work,
        emit=lambda event: None,
    )


def run_stage(
    ctx: StageContext,
    *,
    engine: str = "transformers",
    dtype: str = "float32",
    max_completion_tokens: int = 8,
    weights: dict[str, float] | None = None,
    wandb: str = "disabled",
    guard: GuardConfig | None = None,
    **grpo: Any,
) -> StageResult:
    """Run the stage; by default LoRA with two groups of four and a rate that moves the policy."""
    from tasks.stages.grpo import run

    settings = {
        "steps": 4,
        "prompts_per_step": 2,
        "group_size": GROUP_SIZE,
        "micro_batch_size": 4,
        "learning_rate": 1e-2,
        "save_every": 2,
        "lora": LoraConfig(r=4, alpha=8),
    }
    return run(
        ctx,
        model=ModelConfig(dtype=dtype),
        prompt=PromptConfig(format=PromptFormat.TAGS_SHORT),
        sampler=SamplerConfig(engine=engine, max_completion_tokens=max_completion_tokens),
        rewards=RewardsConfig(
            weights=weights
            or {"tests.support.tiny_grpo:letters": 2.0, "lenient_correctness_check": 1.0}
        ),
        grpo=GrpoConfig(**(settings | grpo)),
        guard=guard or GuardConfig(),
        wandb=WandbConfig(mode=wandb),
    )


def in_process(
    folder: Path, model: Path, engine: str, steps: int, kill_at: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the stage in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.support.tiny_grpo",
        str(folder),
        str(model),
        engine,
        str(steps),
    ]
    command += [] if kill_at is None else [str(kill_at)]
    path = str(REPO)
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> None:
    """See the module's docstring."""
    folder, model, engine, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    kill_at = int(sys.argv[5]) if len(sys.argv) > 5 else None

    def emit(event: dict[str, Any]) -> None:
        print(event, flush=True)
        if kill_at is not None and event.get("done") == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    mode = {"engine": "vllm", "vllm_mode": "server"} if engine == "server" else {"engine": engine}
    run_stage(replace(context(folder, model), emit=emit), steps=int(steps), **mode)


if __name__ == "__main__":
    main()
