"""How the run's settings become TRL's.

Number formats: with LoRA the base weights are held in the run's dtype, as the sampler holds them,
and the adapter in float32. Full fine-tuning in bfloat16 keeps float32 master weights and runs
under autocast: an update of 5e-6 is less than half a bfloat16 step of a typical weight, and would
be rounded away. Attention is eager in bfloat16, where SDPA is known to give NaN gradients on some
padded batches.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from trl import GRPOConfig as TrlGrpoConfig

from ratchet.config.run import Dtype, GrpoConfig
from ratchet.errors import UserError
from tasks.sampling.engines.base import EngineSpec

Sync = Literal["adapter", "merged"]


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
    on_gpu = torch.cuda.is_available()
    # A checkpoint between two passes over one batch would lose the batch.
    save_steps = math.ceil(grpo.save_every / grpo.num_iterations) * grpo.num_iterations
    extra: dict[str, Any] = {}
    if use_vllm:
        in_server = grpo.vllm_mode == "server"
        extra = {
            "use_vllm": True,
            "vllm_mode": grpo.vllm_mode,
            "vllm_gpu_memory_utilization": spec.gpu_memory_utilization,
            "vllm_max_model_length": spec.max_model_len,
            # The engine stops at the tokens the trainer stops at. Text is made by the trainer; a
            # server has no tokenizer to begin with.
            "generation_kwargs": {"stop_token_ids": list(spec.stop_ids)}
            | ({} if in_server else {"detokenize": False}),
        }
    config = TrlGrpoConfig(
        output_dir=str(folder),
        max_steps=grpo.steps,
        per_device_train_batch_size=grpo.micro_batch_size,
        gradient_accumulation_steps=accumulation_steps(grpo, num_processes),
        num_generations=grpo.group_size,
        max_completion_length=max_completion_tokens,
        temperature=grpo.temperature,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        learning_rate=grpo.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=grpo.max_grad_norm,
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
        seed=seed,
        bf16=spec.dtype == "bfloat16" and not grpo.lora.enabled,
        use_cpu=not on_gpu,
        # Costs a fifth of the time for much of the memory: not wanted where memory is plenty.
        gradient_checkpointing=on_gpu,
        ddp_find_unused_parameters=False,  # every step trains all that is trained
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=save_steps,
        report_to=report_to,
        disable_tqdm=True,
        **extra,
    )
    if not on_gpu:  # one of several processes has 'cpu:1' or so, onto which no checkpoint loads
        config._setup_devices = torch.device("cpu")
    return config
