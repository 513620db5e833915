"""Making the trainer of a GRPO run: model, rewards, data, settings and generation backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from transformers import GenerationConfig, PreTrainedTokenizerBase, PrinterCallback

from ratchet.diagnostics.drift import Guard
from ratchet.prompts import STYLE_OF
from ratchet.rollouts.training_log import StepRecords
from tasks.grpo.backend import check_backend, sampling_backend
from tasks.grpo.budget import TokenBudget
from tasks.grpo.data import Prompts
from tasks.grpo.dev import DevCheck
from tasks.grpo.drift_guard import Oversight
from ratchet.rewards.checked import checked_rewards
from tasks.grpo.sections import Sections
from tasks.grpo.settings import (
    attention,
    generation_batches,
    training_dtype,
    trl_config,
)
from tasks.grpo.trainer import Logged, RolloutTrainer
from tasks.models.checkpoints import load_model, model_context, model_location, stop_token_ids
from tasks.models.lora import lora_config
from tasks.runtime.context import StageContext
from tasks.sampling.engines.base import EngineSpec
from tasks.sampling.engines.opening import context_for
from tasks.training.dev_check import DevQuestions, best_step
from tasks.training.resume import CheckpointKeeper
from tasks.training.wandb_run import report_to


def build_trainer(
    ctx: StageContext,
    sections: Sections,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    records: StepRecords,
    on_step: Callable[[int, Logged], None],
    dev: DevQuestions | None = None,
) -> RolloutTrainer:
    """The trainer; UserError for settings or prompts that can't be trained with. `on_step` is
    called after each optimizer step."""
    grpo, dtype = sections.grpo, sections.model.dtype
    check_backend(grpo, sections.sampler, dtype)
    style = STYLE_OF[sections.prompt.format]
    rewards, weights = checked_rewards(sections.rewards, style)
    policy = load_model(
        ctx.inputs["model"], dtype=training_dtype(grpo, dtype), attention=attention(dtype)
    )
    longest = max([prompts.longest, *([] if dev is None else map(len, dev.prompts))])
    spec = _engine_spec(ctx, sections, tokenizer, longest)
    # The budget comes first: a step that spends it is saved, and what is saved is checked.
    budget: list[TokenBudget] = [] if grpo.max_tokens is None else [TokenBudget(grpo.max_tokens)]
    check = [] if dev is None else [DevCheck(dev, spec)]
    # Sampling defaults of the model must not leak into training, and what ends a completion must
    # be what ended it when the questions were sampled.
    policy.generation_config = GenerationConfig(
        eos_token_id=list(spec.stop_ids), bos_token_id=tokenizer.bos_token_id
    )
    config = trl_config(
        grpo,
        spec,
        folder=ctx.work_dir / "training",
        seed=ctx.seed,
        num_processes=PartialState().num_processes,
        use_vllm=sections.sampler.engine == "vllm",
        max_completion_tokens=sections.sampler.max_completion_tokens,
        reward_weights=weights,
        report_to=report_to(sections.wandb),
    )
    count = generation_batches(grpo) * grpo.prompts_per_step
    with sampling_backend(ctx, grpo, sections.sampler, spec, dtype, Path(config.output_dir)):
        trainer = RolloutTrainer(
            prompts=prompts,
            style=style,
            records=records,
            oversight=Oversight(sections.guard, Guard(sections.guard, dtype), ctx.log),
            on_step=on_step,
            refill_rounds=grpo.refill_rounds,
            model=policy,
            reward_funcs=rewards,
            args=config,
            train_dataset=prompts.ordered(count, ctx.seed),
            processing_class=tokenizer,
            peft_config=lora_config(grpo.lora),
            callbacks=[
                *budget,
                *check,
                CheckpointKeeper(grpo.keep_checkpoints, lambda: best_step(records.metrics())),
            ],
        )
    for part in budget:
        part.trainer = trainer
    for one in check:
        one.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    return trainer


def _engine_spec(
    ctx: StageContext,
    sections: Sections,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> EngineSpec:
    """How the policy is sampled; UserError when its context can't hold prompt and completion."""
    start, sampler, grpo = ctx.inputs["model"], sections.sampler, sections.grpo
    engines = 1 if grpo.vllm_mode == "server" else PartialState().num_processes
    return EngineSpec(
        location=model_location(start),
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(start, tokenizer),
        dtype=sections.model.dtype,
        max_model_len=context_for(
            model_context(start), sections.model, longest + sampler.max_completion_tokens
        ),
        max_num_seqs=min(sampler.max_num_seqs, grpo.prompts_per_step * grpo.group_size // engines),
        gpu_memory_utilization=grpo.vllm_memory_utilization,
    )
