"""The configuration sections of the GRPO stage, and how they become TRL's settings.

Number formats: with LoRA the base weights are held in the run's dtype, as the sampler holds them,
and the adapter in float32. Full fine-tuning in bfloat16 keeps float32 master weights and runs
under autocast: an update of 5e-6 is less than half a bfloat16 step of a typical weight, and would
be rounded away. Attention is eager in bfloat16, where SDPA is known to give NaN gradients on some
padded batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from trl import GRPOConfig as TrlGrpoConfig

from ratchet.config.run import (
    Dtype,
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.errors import UserError
from tasks.sampling.engines.base import EngineSpec
from tasks.training.arguments import common_arguments
from tasks.training.vllm import vllm_arguments

Sync = Literal["adapter", "merged"]


@dataclass(frozen=True)
class Sections:
    """What the stage is given."""

    model: ModelConfig
    prompt: PromptConfig
    sampler: SamplerConfig
    rewards: RewardsConfig
    grpo: GrpoConfig
    guard: GuardConfig
    wandb: WandbConfig

    def as_json(self) -> dict[str, Any]:
        """The sections by name, as JSON values."""
        return {
            field.name: getattr(self, field.name).model_dump(mode="json") for field in fields(self)
        }


def resolved_sync(grpo: GrpoConfig, dtype: Dtype) -> Sync:
    """How weights reach vLLM; UserError where the choice can't be right."""
    if grpo.sync == "auto":
        return "adapter" if grpo.lora.enabled else "merged"
    if grpo.sync == "merged" and grpo.lora.enabled and dtype == "bfloat16":
        raise UserError(
            "grpo.sync = 'merged' with LoRA in bfloat16 rounds the base weights a little more at "
            "every merge: use grpo.sync = 'adapter', or model.dtype = 'float32'"
        )
    if grpo.sync == "adapter" and not grpo.lora.enabled:
        raise UserError("grpo.sync = 'adapter' needs grpo.lora.enabled = true")
    return grpo.sync


def training_dtype(grpo: GrpoConfig, dtype: Dtype) -> Dtype:
    """Number format in which the trainer loads the model."""
    return dtype if grpo.lora.enabled else "float32"


def attention(dtype: Dtype) -> str:
    """Attention kernel of the trainer."""
    return "eager" if dtype == "bfloat16" else "sdpa"


def accumulation_steps(grpo: GrpoConfig, num_processes: int) -> int:
    """Micro-batches per optimizer step and process; UserError when they don't fit."""
    batch = grpo.prompts_per_step * grpo.group_size
    share = grpo.micro_batch_size * num_processes
    if batch % share:
        raise UserError(
            f"grpo.prompts_per_step × grpo.group_size = {batch} completions can't be split into "
            f"micro-batches of {grpo.micro_batch_size} on {num_processes} process(es): change "
            "grpo.micro_batch_size"
        )
    return batch // share


def generation_batches(grpo: GrpoConfig) -> int:
    """How many times completions are sampled in the whole run."""
    return math.ceil(grpo.steps / grpo.num_iterations)


def trl_config(
    grpo: GrpoConfig,
    spec: EngineSpec,
    *,
    folder: Path,
    seed: int,
    num_processes: int,
    use_vllm: bool,
    max_completion_tokens: int,
    reward_weights: list[float],
    report_to: list[str],
) -> TrlGrpoConfig:
    """TRL's configuration; every optimizer step uses `prompts_per_step` groups."""
    # A checkpoint between two passes over one batch would lose the batch.
    save_steps = math.ceil(grpo.save_every / grpo.num_iterations) * grpo.num_iterations
    common = common_arguments(
        grpo,
        folder=folder,
        seed=seed,
        num_steps=grpo.steps,
        accumulation_steps=accumulation_steps(grpo, num_processes),
        save_steps=save_steps,
        autocast=spec.dtype == "bfloat16" and not grpo.lora.enabled,
        report_to=report_to,
    )
    config = TrlGrpoConfig(
        **common,
        num_generations=grpo.group_size,
        max_completion_length=max_completion_tokens,
        temperature=grpo.temperature,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        lr_scheduler_type="constant",
        reward_weights=reward_weights,
        beta=grpo.beta,
        loss_type=grpo.loss_type,
        importance_sampling_level=grpo.importance_sampling_level,
        scale_rewards=grpo.scale_rewards,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        num_iterations=grpo.num_iterations,
        disable_dropout=True,
        shuffle_dataset=False,
        ddp_find_unused_parameters=False,  # every step trains all that is trained
        **(vllm_arguments(spec, grpo.vllm_mode) if use_vllm else {}),
    )
    if config.use_cpu:  # one of several processes has 'cpu:1' or so, onto which no checkpoint loads
        config._setup_devices = torch.device("cpu")
    return config
