"""What SFT and on-policy distillation share: trainer arguments, callbacks, the metrics table, the
words about a run.

Where dev questions are answered on the way, the checkpoint that did best on them is the result,
and training ends when they stop getting better.

Weights train in float32; with `model.dtype = 'bfloat16'` the forward and backward pass run under
bfloat16 autocast and the checkpoint is written in bfloat16, as it will be sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback

from ratchet.config.run import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    SamplerConfig,
    SftConfig,
    WandbConfig,
)
from tasks.models.reload_check import ReloadCheck
from tasks.runtime.context import StageContext
from tasks.sampling.engines.opening import engine_spec
from tasks.training.arguments import common_arguments, training_folder
from tasks.training.callbacks import ProgressCallback
from tasks.training.dev_check import (
    DEV_SECONDS,
    DevCheckCallback,
    describe_chosen,
    dev_set,
    dev_summary,
)
from tasks.training.policy import best_policy, save_policy
from tasks.training.resume import CheckpointKeeper, train_from_newest_checkpoint
from tasks.training.wandb_run import report_to

STEPS_PER_WARMUP_STEP = 20
"""The learning rate rises over one step in so many (not at all in a shorter run, whose first step
would be lost) and then falls linearly to nothing."""
NUM_FIXED_TEXTS = 10
"""Completions compared before saving and after loading."""


def trainer_arguments(
    ctx: StageContext,
    section: SftConfig | OpdConfig,
    *,
    model: ModelConfig,
    num_steps: int,
    wandb: WandbConfig,
) -> dict[str, Any]:
    """Keyword arguments that both trainers' configurations take."""
    return common_arguments(
        section,
        folder=training_folder(ctx),
        seed=ctx.seed,
        num_steps=num_steps,
        accumulation_steps=section.batch_size // section.micro_batch_size,
        save_steps=math.ceil(num_steps / section.checkpoints),
        autocast=model.dtype == "bfloat16",
        report_to=report_to(wandb),
    ) | {
        "lr_scheduler_type": "linear",
        "warmup_steps": num_steps // STEPS_PER_WARMUP_STEP,
        "remove_unused_columns": False,
    }


def dev_check(
    ctx: StageContext,
    section: SftConfig | OpdConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
) -> DevCheckCallback | None:
    """The check on dev questions, which ends training; None where there are none or none are
    wanted."""
    dev = dev_set(
        ctx.inputs,
        tokenizer,
        model,
        prompt,
        count=section.dev_questions,
        max_tokens=sampler.max_completion_tokens,
    )
    if dev is None:
        return None
    spec = engine_spec(
        ctx.inputs["model"],
        tokenizer,
        model_config=model,
        sampler=sampler,
        max_prompt_tokens=max(map(len, dev.prompts)),
    )
    return DevCheckCallback(ctx.log, dev, spec, patience=section.patience)


def callbacks(ctx: StageContext, check: DevCheckCallback | None) -> list[TrainerCallback]:
    """Callbacks of both trainers."""
    return [ProgressCallback(ctx), *([] if check is None else [check]), CheckpointKeeper()]


@dataclass(frozen=True)
class Trained:
    """What training left."""

    rows: list[dict[str, float]]
    """The metrics table."""
    seconds: float
    """Of training in this attempt; what an interrupted one spent isn't known."""
    check: ReloadCheck
    num_planned: int
    """Steps there would be without a dev check."""
    dev_seconds: float
    """Spent on dev questions in this attempt, part of `seconds`."""

    def summary(self) -> dict[str, float | int]:
        """Figures for the stage's summary."""
        summary = {
            "num_steps": len(self.rows),
            "first_loss": self.rows[0]["loss"],
            "final_loss": self.rows[-1]["loss"],
            "train_seconds": self.seconds,
        }
        if dev := dev_summary(self.rows):
            summary |= {"num_steps_planned": self.num_planned, "dev_seconds": self.dev_seconds}
        return summary | dev | self.check.summary()

    def describe(self) -> str:
        """The same for people."""
        early = f" of {self.num_planned}" if len(self.rows) < self.num_planned else ""
        return (
            f"Loss {self.rows[0]['loss']:.3f} → {self.rows[-1]['loss']:.3f} in {len(self.rows)}"
            f"{early} steps. {describe_chosen(dev_summary(self.rows))} The reloaded checkpoint "
            f"differs from it by {self.check.mean_difference:.1e} nats per token."
        )


def train(
    ctx: StageContext,
    trainer: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    dtype: str,
    attention: str,
    check: DevCheckCallback | None,
) -> Trained:
    """Train to the end; write the metrics table and the policy, which is compared on the first
    `NUM_FIXED_TEXTS` of `texts` once it is loaded again."""
    began = time.monotonic()
    train_from_newest_checkpoint(
        trainer, ctx.log, lambda rows: check is not None and check.used_up(rows)
    )
    seconds = time.monotonic() - began
    rows = metrics_rows(trainer.state.log_history)
    ctx.write_table("metrics", list(rows))
    reloaded = save_policy(
        best_policy(trainer, rows, ctx.log),
        tokenizer,
        ctx.out_dir,
        texts[:NUM_FIXED_TEXTS],
        dtype=dtype,
        attention=attention,
    )
    dev_seconds = 0.0 if check is None else check.seconds
    return Trained(rows, seconds, reloaded, trainer.args.max_steps, dev_seconds)


UNSTEADY = ("step_time", "num_tokens", "generate_seconds", "sync_seconds", DEV_SECONDS)
"""Logged figures that depend on when a run was interrupted: clocks, and a counter that TRL does
not restore. Without them a resumed run writes the table an uninterrupted one writes."""


def metrics_rows(log_history: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """One row per optimizer step with the figures the trainer logged for it, sorted by name (a
    resumed trainer has read the earlier ones from a file that sorts them)."""
    return [
        {
            name: value
            for name, value in sorted(entry.items())
            if isinstance(value, int | float) and name not in UNSTEADY
        }
        for entry in log_history
        if "loss" in entry
    ]
