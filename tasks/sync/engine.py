"""The colocated vLLM engine under a trainer, configured by us.

TRL builds the engine with arguments of its own; the ones that decide whether trainer and sampler
are the same policy are set here instead: the number format (vLLM picks bfloat16 for a float32
checkpoint unless told), the seed, LoRA, and eager mode on CPUs. `AdapterLLM` puts the adapter's
version on every request and refuses an answer that was made with another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PretrainedConfig
from vllm import LLM, RequestOutput
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from ratchet.errors import UserError
from tasks.runtime.supervisor import free_port
from tasks.runtime.worker import set_environment
from tasks.sampling.engines.base import EngineSpec
from tasks.sampling.engines.vllm_engine import cache_environment
from tasks.sync.adapter import AdapterVersion


@dataclass(frozen=True)
class EngineSettings:
    """What a colocated engine is made with."""

    spec: EngineSpec
    """The model and how it is sampled, as in every other stage."""
    seed: int
    lora_rank: int | None
    """Largest rank of adapters, as `engine_rank` gives it; None for an engine without LoRA."""
    folder: Path
    """Where adapter versions are kept."""


def engine_rank(rank: int) -> int:
    """The smallest rank vLLM can be set up for that holds `rank`; UserError when none does."""
    ranks: tuple[int, ...] = get_args(MaxLoRARanks)
    for allowed in sorted(ranks):
        if rank <= allowed:
            return allowed
    raise UserError(
        f"grpo.lora.r={rank} is more than vLLM can sample (at most {max(ranks)}): lower it, or set "
        "grpo.sync = 'merged' or sampler.engine = 'transformers'"
    )


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of the engine that replace TRL's."""
    arguments: dict[str, Any] = {
        "dtype": settings.spec.dtype,
        "seed": settings.seed,
        "max_num_seqs": settings.spec.max_num_seqs,
        "revision": settings.spec.location.revision,
        "skip_tokenizer_init": True,  # token ids go in and come out
        "generation_config": "vllm",  # no sampling defaults out of the checkpoint
        "disable_log_stats": True,
        "enforce_eager": current_platform.is_cpu(),
    }
    if settings.lora_rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": settings.lora_rank}
    return arguments


@contextmanager
def engine_process(config: PretrainedConfig, spec: EngineSpec) -> Iterator[None]:
    """Around the making of an engine in this process: set what it reads from the environment and
    give the trainer its threads back, which vLLM cuts to one on a CPU. `config` is the language
    model's."""
    set_environment()
    # Left to itself, every run would try the same well-known port, and of two at once one fails.
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    os.environ |= cache_environment(config, spec)
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class AdapterLLM(LLM):
    """An engine that samples from one adapter version at a time."""

    current: AdapterVersion | None = None

    def use(self, version: AdapterVersion) -> None:
        """Load `version` and sample from it from now on; the one before is unloaded.

        UserError when the engine can't take such an adapter.
        """
        if self.current is not None:
            self.llm_engine.remove_lora(self.current.adapter_id)
        try:
            self.llm_engine.add_lora(_request(version))
        except ValueError as error:
            raise UserError(
                f"vLLM can't sample this model with the trained adapter ({error}): set "
                "grpo.sync = 'merged' or sampler.engine = 'transformers'"
            ) from error
        loaded = self.llm_engine.list_loras()
        if loaded != {version.adapter_id}:
            raise RuntimeError(f"vLLM holds adapters {sorted(loaded)}, not just {version.name}")
        self.current = version

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """`LLM.generate` with the current version; RuntimeError if an answer names another."""
        assert self.current is not None, "no adapter version was loaded"
        outputs = super().generate(*args, lora_request=_request(self.current), **kwargs)
        for output in outputs:
            used = output.lora_request
            if used is None or used.lora_name != self.current.name:
                name = "no adapter" if used is None else used.lora_name
                raise RuntimeError(f"vLLM sampled from {name}, not from {self.current.name}")
        return outputs


def _request(version: AdapterVersion) -> LoRARequest:
    return LoRARequest(version.name, version.adapter_id, str(version.folder))


def worker_of(llm: LLM) -> Any:
    """The worker that holds the weights of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker
