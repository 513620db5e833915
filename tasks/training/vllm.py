"""vLLM as the sampler of a trainer, in the trainer's own process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate import PartialState

from ratchet.config.run import LoraConfig, SamplerConfig
from tasks.runtime.context import StageContext
from tasks.sampling.engines.base import EngineSpec


def vllm_arguments(spec: EngineSpec, mode: str = "colocate") -> dict[str, Any]:
    """Arguments of a trainer that samples with vLLM. The engine stops at the tokens the trainer
    stops at. Text is made by the trainer; a server has no tokenizer to begin with."""
    return {
        "use_vllm": True,
        "vllm_mode": mode,
        "vllm_gpu_memory_utilization": spec.gpu_memory_utilization,
        "vllm_max_model_length": spec.max_model_len,
        "generation_kwargs": {"stop_token_ids": list(spec.stop_ids)}
        | ({} if mode == "server" else {"detokenize": False}),
    }


def adapters_folder(ctx: StageContext) -> Path:
    """Where this process keeps the adapter versions that its sampler reads."""
    return ctx.work_dir / "adapters" / str(PartialState().process_index)


def sampling_backend(
    ctx: StageContext,
    sampler: SamplerConfig,
    spec: EngineSpec,
    adapter: LoraConfig | None,
    trainers: ModuleType,
) -> AbstractContextManager[None]:
    """What puts our vLLM backend into the trainer, of the TRL module `trainers`, that is made
    inside; nothing to be put there when the trainer samples by itself. Weights reach the engine as
    versions of the `adapter`, all of them where it is None."""
    if sampler.engine != "vllm":
        return nullcontext()
    from tasks.sync.engine import EngineSettings, engine_rank
    from tasks.sync.generation import AdapterGeneration, MergedGeneration
    from tasks.sync.versioned import sampled_by

    settings = EngineSettings(
        spec=spec,
        seed=ctx.seed,
        lora_rank=None if adapter is None else engine_rank(adapter.r),
        folder=adapters_folder(ctx),
    )
    kind = MergedGeneration if adapter is None else AdapterGeneration
    return sampled_by(kind, settings, trainers)
