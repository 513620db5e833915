"""What SFT and on-policy distillation share: trainer arguments, progress, metrics, the ending.

Weights train in float32; with `model.dtype = 'bfloat16'` the forward and backward pass run under
bfloat16 autocast and the checkpoint is written in bfloat16, as it will be sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ratchet.config import ModelConfig, OpdConfig, SftConfig, WandbConfig
from tasks.context import StageContext
from tasks.models import save_checkpoint
from tasks.reload_check import ReloadCheck, compare_reloaded, fixed_logprobs
from tasks.resume import CheckpointKeeper, newest_checkpoint
from tasks.wandb_run import report_to

SAVES_PER_RUN = 10
"""Checkpoints written on the way; a killed run loses at most this fraction of its steps."""
STEPS_PER_WARMUP_STEP = 20
"""The learning rate rises over one step in so many (not at all in a shorter run, whose first step
would be lost) and then falls linearly to nothing."""
NUM_FIXED_TEXTS = 10
"""Completions compared before saving and after loading."""


def trainer_arguments(
    ctx: StageContext,
    section: SftConfig | OpdConfig,
    name: str,
    *,
    model: ModelConfig,
    num_steps: int,
    wandb: WandbConfig,
) -> dict[str, Any]:
    """Keyword arguments that both trainers' configurations take."""
    micro = section.micro_batch_size
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(training_dir(ctx)),
        "max_steps": num_steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": section.batch_size // micro,
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": num_steps // STEPS_PER_WARMUP_STEP,
        "max_grad_norm": section.max_grad_norm,
        "bf16": model.dtype == "bfloat16",
        "use_cpu": not on_gpu,
        # Costs a fifth of the time for much of the memory: not wanted where memory is plenty.
        "gradient_checkpointing": on_gpu,
        "seed": ctx.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": math.ceil(num_steps / SAVES_PER_RUN),
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": report_to(wandb),
    }


def training_dir(ctx: StageContext) -> Path:
    """Where the trainer keeps its checkpoints."""
    return ctx.work_dir / "training"


class Progress(TrainerCallback):
    """Tells the person who watches how far training is and the newest loss."""

    def __init__(self, ctx: StageContext) -> None:
        self.ctx = ctx

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Called by the trainer after every step."""
        if "loss" in logs:
            note = f"loss {logs['loss']:.4f}, gradient norm {logs['grad_norm']:.2f}"
            self.ctx.progress(state.global_step, state.max_steps, "steps", note)


def callbacks(ctx: StageContext) -> list[TrainerCallback]:
    """Callbacks of both trainers."""
    return [Progress(ctx), CheckpointKeeper()]


@dataclass(frozen=True)
class Trained:
    """What training left."""

    rows: list[dict[str, float]]
    """The metrics table."""
    seconds: float
    """Of training in this attempt; what an interrupted one spent isn't known."""
    check: ReloadCheck

    def summary(self) -> dict[str, float | int]:
        """Figures for the stage's summary."""
        return {
            "num_steps": len(self.rows),
            "first_loss": self.rows[0]["loss"],
            "final_loss": self.rows[-1]["loss"],
            "train_seconds": self.seconds,
        } | self.check.summary()

    def words(self) -> str:
        """The same for people."""
        return (
            f"Loss {self.rows[0]['loss']:.3f} → {self.rows[-1]['loss']:.3f} in {len(self.rows)} "
            "steps. The reloaded checkpoint differs from the trained model by "
            f"{self.check.mean_difference:.1e} nats per token."
        )


def train(
    ctx: StageContext,
    trainer: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    dtype: str,
    attention: str,
) -> Trained:
    """Train from the newest complete checkpoint, if there is one, to the end; save and check.

    Writes the metrics table and what `save_checked` writes; the first `NUM_FIXED_TEXTS` of
    `texts` are what the reloaded checkpoint is compared on.
    """
    start = newest_checkpoint(training_dir(ctx))
    if start is not None:
        ctx.log(f"resuming from {start.name}")
    began = time.monotonic()
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    seconds = time.monotonic() - began
    rows = metrics_rows(trainer.state.log_history)
    ctx.write_table("metrics", list(rows))
    check = save_checked(
        ctx, trainer, tokenizer, texts[:NUM_FIXED_TEXTS], dtype=dtype, attention=attention
    )
    return Trained(rows, seconds, check)


UNSTEADY = ("step_time", "num_tokens")
"""Logged figures that depend on when a run was interrupted: a clock, and a counter that TRL does
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


def save_checked(
    ctx: StageContext,
    trainer: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    dtype: str,
    attention: str,
) -> ReloadCheck:
    """Write `checkpoint/` (merged, in `dtype`) and with LoRA `adapter/`; reload and compare.

    RuntimeError when the reloaded checkpoint isn't the trained model.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    before = fixed_logprobs(model, tokenizer, texts)
    if isinstance(model, PeftModel):
        model.save_pretrained(ctx.out_dir / "adapter")
        model = model.merge_and_unload()
    folder = ctx.out_dir / "checkpoint"
    save_checkpoint(model.to(getattr(torch, dtype)), tokenizer, folder)
    return compare_reloaded(
        before, folder, texts, dtype=dtype, attention=attention, device=model.device
    )
