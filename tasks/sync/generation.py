"""TRL's generation backend, with weights that reach the sampler whole and under a version.

`colocated(...)` puts one of two small subclasses of `VLLMGeneration` in its place while a trainer
is made:

* `AdapterGeneration` (LoRA) saves the adapter under the step that made it and hands it to the
  engine as a LoRA. No merge, megabytes instead of gigabytes, and cached prefixes belong to an
  adapter, so none of an older policy is read.
* `MergedGeneration` (full fine-tuning, or on request) loads every tensor anew. Tensors are cloned
  as they are handed out, because TRL unmerges the adapter in place once the last one is out; and
  it unmerges also when loading fails.

Which policy a batch was sampled from is its `policy_version`: optimizer steps seen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from vllm import LLM
from vllm.platforms import current_platform

from tasks.sync.adapter import AdapterVersion, AdapterVersions
from tasks.sync.engine import (
    AdapterLLM,
    EngineSettings,
    close_engine,
    engine_arguments,
    engine_process,
    worker_of,
)


@dataclass(frozen=True)
class SyncRecord:
    """One transfer of weights to the sampler."""

    policy_version: int
    num_bytes: int
    seconds: float


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class ColocatedGeneration(VLLMGeneration, ABC):
    """What both ways of syncing share: the engine is made with `EngineSettings`.

    The trainer sets `next_version` before it asks for a sync. `on_wire`, where an audit has set it,
    is told every tensor of a transfer as it leaves.
    """

    llm_class: type[LLM] = LLM

    def __init__(self, *args: Any, settings: EngineSettings, **kwargs: Any) -> None:
        self.settings = settings
        self.next_version = 0
        self.last_sync: SyncRecord | None = None
        self.on_wire: Callable[[str, torch.Tensor], None] | None = None
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        def build(**given: Any) -> LLM:
            return self.llm_class(**(given | engine_arguments(self.settings)))

        config = self.model.config.get_text_config()
        with (
            engine_process(config, self.settings.spec),
            _replaced(vllm_generation, "LLM", build),
        ):
            super()._init_vllm()

    def sync_weights(self) -> None:
        """Hand the trainer's weights to the engine as version `next_version`."""
        start = time.perf_counter()
        num_bytes = self._transfer()
        seconds = time.perf_counter() - start
        self.last_sync = SyncRecord(self.next_version, num_bytes, seconds)

    @abstractmethod
    def _transfer(self) -> int:
        """Hand the weights over; returns how many bytes they were."""

    def sampled_version(self) -> AdapterVersion | None:
        """The adapter version that is sampled from; None where the engine holds merged weights."""
        return None

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """TRL's `generate`; RuntimeError when the engine read other prompts than it was given."""
        answer = super().generate(prompts, *args, **kwargs)
        if [list(ids) for ids in answer[0]] != [list(ids) for ids in prompts]:
            raise RuntimeError("vLLM sampled from other prompt tokens than it was given")
        return answer

    def close(self) -> None:
        """Free the engine."""
        close_engine(self.llm)
        del self.llm


class AdapterGeneration(ColocatedGeneration):
    """The adapter itself goes to the sampler, under a version."""

    llm_class = AdapterLLM

    def __init__(self, *args: Any, settings: EngineSettings, **kwargs: Any) -> None:
        self.versions = AdapterVersions(settings.folder)
        super().__init__(*args, settings=settings, **kwargs)

    def _transfer(self) -> int:
        previous: AdapterVersion | None = self.llm.current
        version = self.versions.save(self.model, self.next_version)
        if self.on_wire is not None:
            for name, tensor in version.tensors():
                self.on_wire(name, tensor)
        self.llm.use(version)
        if previous is not None:
            self.versions.remove(previous)
        return version.num_bytes

    def sampled_version(self) -> AdapterVersion | None:
        """See `ColocatedGeneration.sampled_version`."""
        found: AdapterVersion | None = self.llm.current
        return found


class MergedGeneration(ColocatedGeneration):
    """Every weight goes to the sampler, adapters merged in."""

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in super()._iter_named_params():
                self._num_bytes += tensor.nbytes
                copy = tensor.clone()
                if self.on_wire is not None:
                    self.on_wire(name, copy)
                yield name, copy
        finally:
            # Already done when TRL's iterator was read to its end.
            if any(layer.merged for layer in self._tuner_layers()):
                self.model.unmerge_adapter()

    def _tuner_layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self.model.modules() if isinstance(module, BaseTunerLayer))

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
def colocated(kind: type[ColocatedGeneration], settings: EngineSettings) -> Iterator[None]:
    """While it lasts, a GRPO trainer that is made gets `kind` as its generation backend."""
    with _replaced(grpo_trainer, "VLLMGeneration", partial(kind, settings=settings)):
        yield
