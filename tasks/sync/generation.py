"""TRL's generation backend with an engine in the trainer's process.

`colocated(...)` puts `AdapterGeneration` or `MergedGeneration` in the place of `VLLMGeneration`
while a trainer is made; what they share with other backends is in `tasks.sync.versioned`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from vllm import LLM
from vllm.platforms import current_platform

from tasks.sync.engine import (
    AdapterLLM,
    EngineSettings,
    close_engine,
    engine_arguments,
    engine_process,
    worker_of,
)
from tasks.sync.versioned import (
    AdapterSampler,
    AdapterSync,
    MergedSync,
    SyncRecord,
    VersionedGeneration,
    replaced,
)

__all__ = [
    "AdapterGeneration",
    "ColocatedGeneration",
    "MergedGeneration",
    "SyncRecord",
    "colocated",
]


class ColocatedGeneration(VersionedGeneration):
    """The engine is made here, with `EngineSettings`."""

    llm_class: type[LLM] = LLM

    def _init_vllm(self) -> None:
        def build(**given: Any) -> LLM:
            return self.llm_class(**(given | engine_arguments(self.settings)))

        config = self.model.config.get_text_config()
        with (
            engine_process(config, self.settings.spec),
            replaced(vllm_generation, "LLM", build),
        ):
            super()._init_vllm()

    def close(self) -> None:
        """Free the engine."""
        close_engine(self.llm)
        del self.llm


class AdapterGeneration(AdapterSync, ColocatedGeneration):
    """The adapter itself goes to the engine, under a version."""

    llm_class = AdapterLLM

    @property
    def sampler(self) -> AdapterSampler:
        """The engine."""
        engine: AdapterSampler = self.llm
        return engine


class MergedGeneration(MergedSync, ColocatedGeneration):
    """Every weight goes to the engine, adapters merged in."""

    def _transfer(self) -> int:
        self._num_bytes = 0
        if current_platform.is_cpu():
            self._reload()
        else:
            VLLMGeneration.sync_weights(self)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after a weight sync")
        return self._num_bytes

    def _reload(self) -> None:
        """Load all weights through vLLM's reload.

        The CPU backend keeps linear weights in a packed form only, which a plain load can't reach.
        The head's packed copy isn't renewed where it shares the embedding's weight, so it is
        packed again.
        """
        worker_of(self.llm).reload_weights(weights_iterator=self._iter_named_params())
        head = worker_of(self.llm).get_model().lm_head
        head.quant_method.process_weights_after_loading(head)


@contextmanager
def colocated(
    kind: type[ColocatedGeneration], settings: EngineSettings, trainers: ModuleType = grpo_trainer
) -> Iterator[None]:
    """While it lasts, a trainer of the TRL module `trainers` that is made gets `kind` as its
    generation backend."""
    with replaced(trainers, "VLLMGeneration", partial(kind, settings=settings)):
        yield
