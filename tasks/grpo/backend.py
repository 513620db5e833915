"""Which sampler a GRPO run gets, and whether it can be right there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from accelerate import PartialState

from ratchet.config.run import Dtype, GrpoConfig, SamplerConfig
from ratchet.errors import UserError
from tasks.grpo.settings import resolved_sync
from tasks.grpo.trainer import step_seed
from tasks.runtime.context import StageContext
from tasks.sampling.engines.base import EngineSpec
from tasks.training.resume import PREFIX, newest_checkpoint


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


def sampling_backend(
    ctx: StageContext,
    grpo: GrpoConfig,
    sampler: SamplerConfig,
    spec: EngineSpec,
    dtype: Dtype,
    training_folder: Path,
) -> AbstractContextManager[None]:
    """What puts our vLLM backend into the trainer that is made inside; nothing to be put there when
    the trainer samples by itself."""
    if sampler.engine != "vllm":
        return nullcontext()
    from tasks.sync import generation, server_generation
    from tasks.sync.engine import EngineSettings, engine_rank
    from tasks.sync.server import ServerSettings
    from tasks.sync.versioned import sampled_by

    by_adapter = resolved_sync(grpo, dtype) == "adapter"
    lora_rank = engine_rank(grpo.lora.r) if by_adapter else None
    folder = ctx.work_dir / "adapters" / str(PartialState().process_index)
    if grpo.vllm_mode == "server":
        return sampled_by(
            server_generation.ServerAdapterGeneration
            if by_adapter
            else server_generation.ServerMergedGeneration,
            ServerSettings(
                spec=spec,
                seed=server_seed(ctx.seed, training_folder),
                lora_rank=lora_rank,
                folder=folder,
                device=grpo.vllm_server_device,
                log_file=ctx.work_dir / "vllm-server.log",
                log=ctx.log,
            ),
        )
    return sampled_by(
        generation.AdapterGeneration if by_adapter else generation.MergedGeneration,
        EngineSettings(spec=spec, seed=ctx.seed, lora_rank=lora_rank, folder=folder),
    )


def server_seed(seed: int, training_folder: Path) -> int:
    """Seed of a server, from the run's and the step that it starts at: a continued run doesn't draw
    the random numbers of its first steps again."""
    start = newest_checkpoint(training_folder)
    return step_seed(seed, 0 if start is None else int(start.name.removeprefix(PREFIX)), rank=0)
