"""Making the trainer of a GRPO run: model, rewards, data, settings and sampler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from transformers import GenerationConfig, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl.trainer import grpo_trainer

from ratchet.config.run import Dtype, GrpoConfig, SamplerConfig
from ratchet.diagnostics.drift import Guard
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF
from ratchet.rewards.checked import checked_rewards
from ratchet.rollouts.training_log import TrainingLog
from tasks.grpo.callbacks import TokenBudget, TrainingLogCallback
from tasks.grpo.data import Prompts
from tasks.grpo.drift_guard import DriftGuardCallback
from tasks.grpo.settings import (
    Sections,
    attention,
    generation_batches,
    resolved_sync,
    training_dtype,
    trl_config,
)
from tasks.grpo.trainer import RolloutTrainer
from tasks.models.checkpoints import load_model
from tasks.models.lora import lora_config
from tasks.runtime.context import StageContext
from tasks.sampling.engines.base import EngineSpec
from tasks.sampling.engines.opening import engine_spec
from tasks.training.arguments import training_folder
from tasks.training.dev_check import DevCheckCallback, EvalSet
from tasks.training.resume import CheckpointKeeper, newest_checkpoint, step_of
from tasks.training.seeds import step_seed
from tasks.training.vllm import adapters_folder, sampling_backend
from tasks.training.wandb_run import report_to


def build_trainer(
    ctx: StageContext,
    sections: Sections,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    training_log: TrainingLog,
    dev: EvalSet | None = None,
) -> RolloutTrainer:
    """The trainer; UserError for settings or prompts that can't be trained with. `dev` holds the
    dev questions."""
    grpo, dtype = sections.grpo, sections.model.dtype
    use_vllm = sections.sampler.engine == "vllm"
    check_backend(grpo, sections.sampler, dtype)
    style = STYLE_OF[sections.prompt.format]
    rewards, weights = checked_rewards(sections.rewards.weights, style)
    policy = load_model(
        ctx.inputs["model"], dtype=training_dtype(grpo, dtype), attention=attention(dtype)
    )
    spec = _engine_spec(ctx, sections, tokenizer, prompts, dev)
    # Sampling defaults of the model must not leak into training, and what ends a completion must
    # be what ended it when the questions were sampled.
    policy.generation_config = GenerationConfig(
        eos_token_id=list(spec.stop_ids), bos_token_id=tokenizer.bos_token_id
    )
    config = trl_config(
        grpo,
        spec,
        folder=training_folder(ctx),
        seed=ctx.seed,
        num_processes=PartialState().num_processes,
        use_vllm=use_vllm,
        max_completion_tokens=sections.sampler.max_completion_tokens,
        reward_weights=weights,
        report_to=report_to(sections.wandb),
    )
    adapter = lora_config(grpo.lora)
    callbacks: list[TrainerCallback] = [
        TrainingLogCallback(
            ctx, training_log, sections.as_json(), None if adapter is None else adapter.to_dict()
        ),
        CheckpointKeeper(grpo.keep_checkpoints),
    ]
    if dev is not None:
        callbacks.insert(0, DevCheckCallback(ctx.log, dev, spec, by_engine=use_vllm))
    if grpo.max_tokens is not None:  # first: a step that spends it is saved, and so checked
        callbacks.insert(0, TokenBudget(grpo.max_tokens))
    count = generation_batches(grpo) * grpo.prompts_per_step
    with policy_sampler(ctx, grpo, sections.sampler, spec, dtype):
        trainer = RolloutTrainer(
            prompts=prompts,
            style=style,
            training_log=training_log,
            drift_guard=DriftGuardCallback(sections.guard, Guard(sections.guard, dtype), ctx.log),
            refill_rounds=grpo.refill_rounds,
            model=policy,
            reward_funcs=rewards,
            args=config,
            train_dataset=prompts.ordered(count, ctx.seed),
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _engine_spec(
    ctx: StageContext,
    sections: Sections,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    dev: EvalSet | None,
) -> EngineSpec:
    """How the policy is sampled; UserError when its context can't hold prompt and completion."""
    grpo = sections.grpo
    spec = engine_spec(
        ctx.inputs["model"],
        tokenizer,
        model_config=sections.model,
        sampler=sections.sampler,
        max_prompt_tokens=max([prompts.longest, *([] if dev is None else map(len, dev.prompts))]),
    )
    engines = 1 if grpo.vllm_mode == "server" else PartialState().num_processes
    most = grpo.prompts_per_step * grpo.group_size // engines
    return replace(
        spec,
        max_num_seqs=min(spec.max_num_seqs, most),
        gpu_memory_utilization=grpo.vllm_memory_utilization,
    )


def check_backend(grpo: GrpoConfig, sampler: SamplerConfig, dtype: Dtype) -> None:
    """UserError for settings that the sampler can't take, before anything is loaded."""
    if sampler.engine != "vllm":
        if grpo.vllm_mode == "server":
            raise UserError(
                "grpo.vllm_mode = 'server' needs vLLM, which is not what this run samples with: "
                "install it or set sampler.engine = 'vllm', or leave grpo.vllm_mode out"
            )
        return
    from tasks.sync.engine import engine_rank
    from tasks.sync.server_generation import check_nccl_devices

    if resolved_sync(grpo, dtype) == "adapter":
        engine_rank(grpo.lora.r)
    elif grpo.vllm_mode == "server":
        check_nccl_devices(grpo.vllm_server_device, PartialState().num_processes)


def policy_sampler(
    ctx: StageContext, grpo: GrpoConfig, sampler: SamplerConfig, spec: EngineSpec, dtype: Dtype
) -> AbstractContextManager[None]:
    """What puts our sampler into the trainer that is made inside: vLLM in a server that it starts,
    or see `sampling_backend`."""
    by_adapter = sampler.engine == "vllm" and resolved_sync(grpo, dtype) == "adapter"
    adapter = grpo.lora if by_adapter else None
    if grpo.vllm_mode == "colocate":
        return sampling_backend(ctx, sampler, spec, adapter, grpo_trainer)
    from tasks.sync import server_generation
    from tasks.sync.engine import engine_rank
    from tasks.sync.server import ServerSettings
    from tasks.sync.versioned import sampled_by

    return sampled_by(
        server_generation.ServerMergedGeneration
        if adapter is None
        else server_generation.ServerAdapterGeneration,
        ServerSettings(
            spec=spec,
            seed=server_seed(ctx.seed, training_folder(ctx)),
            lora_rank=None if adapter is None else engine_rank(adapter.r),
            folder=adapters_folder(ctx),
            device=grpo.vllm_server_device,
            log_file=ctx.work_dir / "vllm-server.log",
            log=ctx.log,
        ),
    )


def server_seed(seed: int, folder: Path) -> int:
    """Seed of a server, from the run's and the step that it starts at: a continued run doesn't draw
    the random numbers of its first steps again."""
    return step_seed(seed, step_of(newest_checkpoint(folder)), rank=0)
