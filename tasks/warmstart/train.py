"""What SFT and on-policy distillation share: trainer arguments, progress, metrics, the ending.

Where dev questions are answered on the way, the checkpoint that did best on them is the result,
and training ends when they stop getting better. Their figures are part of each step's log, which
lies in every checkpoint: a resumed run knows what an uninterrupted one would.

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
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

from ratchet.config.run import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    SamplerConfig,
    SftConfig,
    WandbConfig,
)
from tasks.models.checkpoints import model_context, model_location, save_checkpoint, stop_token_ids
from tasks.models.reload_check import ReloadCheck, compare_reloaded, fixed_logprobs
from tasks.runtime.context import StageContext
from tasks.sampling.engines.base import EngineSpec
from tasks.sampling.engines.opening import context_for
from tasks.training.dev_check import (
    DEV_STRICT,
    DevQuestions,
    answers_in_training,
    best_step,
    chosen_words,
    dev_questions,
    dev_summary,
    policy_of,
)
from tasks.training.resume import CheckpointKeeper, newest_checkpoint
from tasks.training.wandb_run import report_to

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
        "save_steps": math.ceil(num_steps / section.checkpoints),
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": report_to(wandb),
    }


def training_dir(ctx: StageContext) -> Path:
    """Where the trainer keeps its checkpoints."""
    return ctx.work_dir / "training"


def engine_spec(
    ctx: StageContext,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    model: ModelConfig,
    sampler: SamplerConfig,
    gpu_memory_utilization: float = 0.0,
) -> EngineSpec:
    """How the model in training is sampled on `prompts` (token ids); UserError when its context
    can't hold the longest one and its completion. The share of memory is vLLM's."""
    start = ctx.inputs["model"]
    need = max(map(len, prompts)) + sampler.max_completion_tokens
    return EngineSpec(
        location=model_location(start),
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(start, tokenizer),
        dtype=model.dtype,
        max_model_len=context_for(model_context(start), model, need),
        max_num_seqs=sampler.max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
    )


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


class EarlyStop(TrainerCallback):
    """Answers the dev questions whenever a checkpoint is due, by the trainer's own weights; ends
    training after `patience` checkpoints in a row that are worse than the best."""

    def __init__(
        self, ctx: StageContext, questions: DevQuestions, spec: EngineSpec, patience: int
    ) -> None:
        self.ctx = ctx
        self.questions = questions
        self.spec = spec
        self.patience = patience
        self.trainer: Any = None
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after the weights have changed; it has decided about saving."""
        if not control.should_save:
            return
        start = time.monotonic()
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        figures = self.questions.figures(answers_in_training(policy, self.questions, self.spec))
        self.seconds += time.monotonic() - start
        for name, value in figures.items():
            self.trainer._metrics["train"][name].append(value)
        self.ctx.log(f"step {state.global_step}: {figures[DEV_STRICT]:.1%} strict on dev questions")
        if self.used_up([*state.log_history, {"step": state.global_step} | figures]):
            control.should_training_stop = True

    def used_up(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether training has to end after what was logged."""
        best = best_step(rows)
        if best is None:
            return False
        later = [row for row in rows if row.get(DEV_STRICT) is not None and row["step"] > best]
        return len(later) >= self.patience


def early_stop(
    ctx: StageContext,
    section: SftConfig | OpdConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
) -> EarlyStop | None:
    """The check on dev questions; None where there are none or none are wanted."""
    limit = sampler.max_completion_tokens
    found = dev_questions(
        ctx.inputs, tokenizer, model, prompt, count=section.dev_questions, max_tokens=limit
    )
    if found is None:
        return None
    spec = engine_spec(ctx, tokenizer, found.prompts, model=model, sampler=sampler)
    return EarlyStop(ctx, found, spec, section.patience)


def callbacks(ctx: StageContext, early: EarlyStop | None = None) -> list[TrainerCallback]:
    """Callbacks of both trainers."""
    if early is None:
        return [Progress(ctx), CheckpointKeeper()]
    keeper = CheckpointKeeper(best=lambda: best_step(early.trainer.state.log_history))
    return [Progress(ctx), early, keeper]


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
        dev = dev_summary(self.rows)
        return {
            "num_steps": len(self.rows),
            "first_loss": self.rows[0]["loss"],
            "final_loss": self.rows[-1]["loss"],
            "train_seconds": self.seconds,
            **(
                {"num_steps_planned": self.num_planned, "dev_seconds": self.dev_seconds}
                if dev
                else {}
            ),
            **dev,
            **self.check.summary(),
        }

    def words(self) -> str:
        """The same for people."""
        early = f" of {self.num_planned}" if len(self.rows) < self.num_planned else ""
        return (
            f"Loss {self.rows[0]['loss']:.3f} → {self.rows[-1]['loss']:.3f} in {len(self.rows)}"
            f"{early} steps. {chosen_words(dev_summary(self.rows))} The reloaded checkpoint "
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
    early: EarlyStop | None = None,
) -> Trained:
    """Train from the newest complete checkpoint, if there is one, to the end; save and check.

    Writes the metrics table and what `save_checked` writes; the first `NUM_FIXED_TEXTS` of
    `texts` are what the reloaded checkpoint is compared on.
    """
    if early is not None:
        early.trainer = trainer
    began = time.monotonic()
    _train_on(ctx, trainer, early)
    seconds = time.monotonic() - began
    rows = metrics_rows(trainer.state.log_history)
    ctx.write_table("metrics", list(rows))
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    best = best_step(rows)
    if best is not None and best != rows[-1]["step"]:
        policy = policy_of(policy, training_dir(ctx), best)
    check = save_checked(
        ctx, policy, tokenizer, texts[:NUM_FIXED_TEXTS], dtype=dtype, attention=attention
    )
    return Trained(
        rows, seconds, check, trainer.args.max_steps, 0.0 if early is None else early.seconds
    )


def _train_on(ctx: StageContext, trainer: Any, early: EarlyStop | None) -> None:
    """Train to the end, from the newest complete checkpoint if there is one."""
    start = newest_checkpoint(training_dir(ctx))
    if start is None:
        trainer.train()
        return
    ctx.log(f"resuming from {start.name}")
    past = TrainerState.load_from_json(str(start / "trainer_state.json"))
    if early is not None and early.used_up(past.log_history):
        # Killed after its last step. The best checkpoint is on disk, the newest one isn't needed.
        trainer.state = past
        return
    trainer.train(resume_from_checkpoint=str(start))


UNSTEADY = ("step_time", "num_tokens", "generate_seconds", "sync_seconds")
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


def save_checked(
    ctx: StageContext,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    dtype: str,
    attention: str,
) -> ReloadCheck:
    """Write `checkpoint/` (merged, in `dtype`) and with LoRA `adapter/`; reload and compare.

    RuntimeError when the reloaded checkpoint isn't the trained model.
    """
    before = fixed_logprobs(model, tokenizer, texts)
    if isinstance(model, PeftModel):
        model.save_pretrained(ctx.out_dir / "adapter")
        model = model.merge_and_unload()
    folder = ctx.out_dir / "checkpoint"
    save_checkpoint(model.to(getattr(torch, dtype)), tokenizer, folder)
    return compare_reloaded(
        before, folder, texts, dtype=dtype, attention=attention, device=model.device
    )
