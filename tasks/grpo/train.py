"""GRPO training in one process, from questions to a trained policy.

A killed run continues from its newest complete checkpoint (`tasks.training.resume`) and, but for
vLLM in a server, repeats the steps after it exactly: data order, sampling seeds and optimizer state
are functions of the seed and the step. A run that the drift guard halts, or whose server dies, has
saved the policy that it had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ratchet.errors import UserError
from ratchet.rollouts.training_log import TrainingLog
from ratchet.rollouts.training_run import STEPS_FOLDER
from tasks.grpo.build import build_trainer
from tasks.grpo.callbacks import tokens_of
from tasks.grpo.data import Prompts, build_prompts, rl_questions
from tasks.grpo.settings import Sections
from tasks.grpo.trainer import RolloutTrainer
from tasks.models.checkpoints import load_tokenizer
from tasks.runtime.context import StageContext
from tasks.sync.types import ServerError
from tasks.training.arguments import training_folder
from tasks.training.dev_check import dev_set
from tasks.training.resume import (
    newest_checkpoint,
    save_now,
    step_of,
    train_from_newest_checkpoint,
)
from tasks.training.wandb_run import wandb_run


@dataclass(frozen=True)
class Trained:
    """What training left in this process."""

    trainer: RolloutTrainer
    training_log: TrainingLog
    tokenizer: PreTrainedTokenizerBase
    num_questions: int
    wandb_place: str | None


def prepare(ctx: StageContext, sections: Sections) -> tuple[PreTrainedTokenizerBase, Prompts]:
    """Tokenizer and questions; UserError for none."""
    questions = rl_questions(ctx.inputs)
    tokenizer = load_tokenizer(ctx.inputs["model"])
    thinking = sections.model.enable_thinking
    return tokenizer, build_prompts(questions, tokenizer, sections.prompt, enable_thinking=thinking)


def train(
    ctx: StageContext, sections: Sections, tokenizer: PreTrainedTokenizerBase, prompts: Prompts
) -> Trained:
    """Train to the end, or this process's part of it where several train; what was logged after
    the newest checkpoint is forgotten."""
    grpo, training_log = sections.grpo, TrainingLog(ctx.work_dir / STEPS_FOLDER)
    settings = {name: sections.as_json()[name] for name in ("grpo", "rewards")}
    with wandb_run(ctx, "grpo", sections.wandb, settings) as wandb_place:
        dev = dev_set(
            ctx.inputs,
            tokenizer,
            sections.model,
            sections.prompt,
            count=grpo.dev_questions,
            max_tokens=sections.sampler.max_completion_tokens,
        )
        trainer = build_trainer(ctx, sections, tokenizer, prompts, training_log, dev)
        try:
            if trainer.accelerator.is_main_process:
                training_log.forget_after(step_of(newest_checkpoint(training_folder(ctx))))
            trainer.accelerator.wait_for_everyone()
            trainer.drift_guard.guard.first_drift = training_log.first("drift_mean")
            train_from_newest_checkpoint(
                trainer, ctx.log, lambda rows: tokens_of(rows) >= (grpo.max_tokens or math.inf)
            )
        except ServerError as error:
            raise lost_sampler(trainer, training_log, error) from error
        finally:
            if trainer.use_vllm:
                trainer.vllm_generation.close()
    return Trained(trainer, training_log, tokenizer, len(prompts.rows), wandb_place)


def lost_sampler(
    trainer: RolloutTrainer, training_log: TrainingLog, error: ServerError
) -> UserError:
    """What to tell when the server failed; the policy is saved first, where it is that of a step
    that is written down whole."""
    step, logged = trainer.state.global_step, len(training_log.metrics())
    if trainer.accelerator.num_processes == 1 and logged == step:
        save_now(trainer)
    newest = newest_checkpoint(Path(trainer.args.output_dir))
    kept = "nothing was trained yet" if newest is None else f"{newest.name} is saved"
    what, _, log = str(error).partition("\n")
    return UserError(
        f"{what} in step {step + 1} of GRPO, {log.partition(':')[0]}: {kept}, and the same command "
        "goes on from there"
    )
