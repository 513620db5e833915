"""What our trainer costs beside TRL's: seconds per optimizer step of both, step by step in turn.

Not a test module. Two processes train the same model with the same settings, questions, seeds and
vLLM backend: one with `RolloutTrainer` (verdicts, tables, guard, doctor), one with TRL's
`GRPOTrainer`, to which only the tokenised prompts and the seeds are added, so that both sample the
same tokens. They take turns, one step each: a pair is the same work, on a machine that is equally
busy. The demo's shape: the seedling, 8 groups of 8, LoRA on every layer.

    python -m benchmarks.trainer_cost [PAIRS] [ENGINE]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

WARM_UP = 2
"""Steps before the first pair: the engine's and the allocator's first calls."""


def turns() -> Any:
    """A callback that waits for a line of input before each step and tells what the last cost."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        started: tuple[float, float] | None = None
        length = 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            self.length = logs.get("completions/mean_length", self.length)

        def tell(self) -> None:
            if self.started is not None:
                now = time.perf_counter(), time.process_time()
                wall, cpu = (b - a for a, b in zip(self.started, now, strict=True))
                print(json.dumps({"wall": wall, "cpu": cpu, "length": self.length}), flush=True)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tell()
            sys.stdin.readline()
            self.started = time.perf_counter(), time.process_time()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tell()

    return Turns()


def plain() -> Any:
    """TRL's trainer with our prompts and seeds, taking what `build_trainer` gives to ours."""
    from trl import GRPOTrainer

    from tasks.training.seeds import step_seed

    class PlainTrainer(GRPOTrainer):
        def __init__(self, *, prompts: Any, **kwargs: Any) -> None:
            for ours in ("style", "training_log", "drift_guard", "refill_rounds", "callbacks"):
                kwargs.pop(ours)
            self.prompts = prompts
            super().__init__(**kwargs)

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [self.prompts.ids[text] for text in prompts], None, {}

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            import torch

            torch.manual_seed(step_seed(self.args.seed, self.state.global_step, 0))
            if self.use_vllm:
                self.vllm_generation.next_version = self.state.global_step
            return super()._generate_single_turn(*args, **kwargs)

    return PlainTrainer


def serve(kind: str, steps: int, engine: str, folder: Path) -> None:
    """Train, one step per line of input."""
    from benchmarks.drift_runs import inputs
    from ratchet.config.run import (
        GrpoConfig,
        GuardConfig,
        ModelConfig,
        PromptConfig,
        PromptFormat,
        RewardsConfig,
        SamplerConfig,
        WandbConfig,
    )
    from ratchet.rollouts.training_log import TrainingLog
    from tasks.grpo import build
    from tasks.grpo.data import build_prompts, rl_questions
    from tasks.models.checkpoints import load_tokenizer
    from tests.support.tiny_grpo import SEEDLING, context

    if kind == "plain":
        build.RolloutTrainer = plain()  # type: ignore[misc]
    ctx = context(folder, SEEDLING)
    ctx = replace(ctx, inputs={**ctx.inputs, **inputs(folder)})
    grpo = GrpoConfig(
        steps=steps,
        prompts_per_step=8,
        group_size=8,
        micro_batch_size=64,
        learning_rate=1e-3,
        save_every=10 * steps,
    )
    sections = build.Sections(
        ModelConfig(),
        PromptConfig(format=PromptFormat.TAGS_SHORT),
        SamplerConfig(engine=engine, max_completion_tokens=64),
        RewardsConfig(),
        grpo,
        GuardConfig(),
        WandbConfig(),
    )
    tokenizer = load_tokenizer(ctx.inputs["model"])
    prompts = build_prompts(
        rl_questions(ctx.inputs), tokenizer, sections.prompt, enable_thinking=False
    )
    training_log = TrainingLog(ctx.work_dir / "steps")
    trainer = build.build_trainer(ctx, sections, tokenizer, prompts, training_log)
    trainer.add_callback(turns())
    trainer.train()
    if trainer.use_vllm:
        trainer.vllm_generation.close()


def measure(pairs: int, engine: str) -> None:
    """Print both figures of every pair, the ratio of each, and the medians."""
    steps = pairs + WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for kind in ("plain", "ours"):
            place = Path(folder) / kind
            place.mkdir()
            arguments = ["serve", kind, str(steps), engine, str(place)]
            command = [sys.executable, "-m", "benchmarks.trainer_cost", *arguments]
            children[kind] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
        for step in range(steps):
            order = ("plain", "ours") if step % 2 else ("ours", "plain")
            found = {kind: turn(children[kind]) for kind in order}
            if step < WARM_UP:
                continue
            for clock, values in ratios.items():
                values.append(found["ours"][clock] / found["plain"][clock])
            print(
                f"pair {step - WARM_UP + 1}: plain {found['plain']['wall']:.3f} s, ours "
                f"{found['ours']['wall']:.3f} s, ratio {ratios['wall'][-1]:.3f}; processor time "
                f"{found['plain']['cpu']:.3f} s, {found['ours']['cpu']:.3f} s, ratio "
                f"{ratios['cpu'][-1]:.3f}; tokens per completion {found['plain']['length']:.2f}, "
                f"{found['ours']['length']:.2f}",
                flush=True,
            )
        for child in children.values():
            assert child.wait() == 0
    for clock, values in ratios.items():
        print(f"{clock}: median ratio {statistics.median(values):.4f} over {len(values)} pairs")


def turn(child: subprocess.Popen[str]) -> dict[str, float]:
    """One step of one trainer."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    while True:
        line = child.stdout.readline()
        assert line, "the trainer ended"
        if line.startswith('{"wall"'):
            found: dict[str, float] = json.loads(line)
            return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    else:
        measure(int((sys.argv[1:] or ["20"])[0]), (sys.argv[2:] or ["vllm"])[0])
