"""What every generation backend of ours adds to TRL's, wherever the sampler runs.

`VersionedGeneration` is the whole of what the audit and the drift guard know of a sampler: hand the
trainer's weights over, sample, score given tokens, read the weights back, say how it is set up.
All of it goes the ways that training uses, not ways of the audit's own.

* A sync hands the policy over as version `next_version`, optimizer steps seen, and is timed.
* `AdapterSync` (LoRA) saves the adapter under the version and lets the sampler load it.
  No merge, megabytes instead of gigabytes, and cached prefixes belong to an adapter, so none of an
  older policy is read.
* `MergedSync` (full fine-tuning, or on request) hands out every tensor anew, in the number format
  of the sampler. Tensors are cloned, because TRL unmerges the adapter in place once the last one is
  out (`benchmarks.packing`); and the adapter is unmerged also when loading fails.

How weights and requests travel is for the subclasses to say: `tasks.sync.generation` (an engine
in the trainer's process), `tasks.sync.server_generation` (a server of our own).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from tasks.sync.adapter import AdapterVersion, AdapterVersions
from tasks.sync.engine import AdapterLLM, EngineSettings
from tasks.sync.server_client import ServerClient
from tasks.sync.types import EngineFacts, OnWire, Sampled, SyncRecord


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """While it lasts, `module` has `value` under `name`."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class VersionedGeneration(VLLMGeneration, ABC):
    """TRL's backend whose sampler is made with `EngineSettings` and sampled under a version.

    The trainer sets `next_version` before it asks for a sync. `on_wire`, where an audit has set it,
    is told every tensor of a transfer as it leaves.
    """

    temperature: float
    max_completion_length: int

    def __init__(self, *args: Any, settings: EngineSettings, **kwargs: Any) -> None:
        self.settings = settings
        self.next_version = 0
        self.last_sync: SyncRecord | None = None
        self.on_wire: OnWire | None = None
        super().__init__(*args, **kwargs)

    def sync_weights(self) -> None:
        """Hand the trainer's weights to the sampler as version `next_version`."""
        start = time.perf_counter()
        num_bytes = self._transfer()
        seconds = time.perf_counter() - start
        self.last_sync = SyncRecord(self.next_version, num_bytes, seconds)

    def sync_as(self, step: int, on_wire: OnWire | None = None) -> SyncRecord:
        """Hand the trainer's weights over as version `step`, telling `on_wire` each tensor."""
        self.next_version, self.on_wire = step, on_wire
        try:
            self.sync_weights()
        finally:
            self.on_wire = None
        assert self.last_sync is not None
        return self.last_sync

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

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, temperature: float, max_tokens: int
    ) -> list[Sampled]:
        """`n` completions of each prompt, those of a prompt side by side, from the newest
        version, the way training samples."""
        before = self.temperature, self.max_completion_length
        self.temperature, self.max_completion_length = temperature, max_tokens
        try:
            return self._sample([list(prompt) for prompt in prompts], n)
        finally:
            self.temperature, self.max_completion_length = before

    @abstractmethod
    def _sample(self, prompts: list[list[int]], n: int) -> list[Sampled]:
        """See `sample`; temperature and length are set."""

    @abstractmethod
    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability at temperature 1 of every token after the first of each sequence, given
        those before it (vLLM's `prompt_logprobs`, which never reads the prefix cache)."""

    @abstractmethod
    def effective_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in the checkpoint, and value of every weight that the newest version is sampled
        with, adapter included; head and embedding apart even where they are tied."""

    @abstractmethod
    def facts(self) -> EngineFacts:
        """How the engine is set up."""

    @abstractmethod
    def close(self) -> None:
        """Free the sampler."""


@contextmanager
def sampled_by(
    kind: type[VersionedGeneration], settings: EngineSettings, trainers: ModuleType = grpo_trainer
) -> Iterator[None]:
    """While it lasts, a trainer of the TRL module `trainers` that is made gets `kind` as its
    generation backend."""
    with replaced(trainers, "VLLMGeneration", partial(kind, settings=settings)):
        yield


class AdapterSync(VersionedGeneration):
    """The adapter itself goes to the sampler, under a version."""

    def __init__(self, *args: Any, settings: EngineSettings, **kwargs: Any) -> None:
        self.versions = AdapterVersions(settings.folder)
        super().__init__(*args, settings=settings, **kwargs)

    @property
    def sampler(self) -> AdapterLLM | ServerClient:
        """What loads the versions."""
        loads: AdapterLLM | ServerClient
        loads = self.vllm_client if self.mode == "server" else self.llm
        return loads

    def _transfer(self) -> int:
        previous = self.sampler.current
        version = self.versions.save(self.model, self.next_version)
        if self.on_wire is not None:
            for name, tensor in version.tensors():
                self.on_wire(name, tensor)
        self.sampler.use(version)
        if previous is not None:
            self.versions.remove(previous)
        return version.num_bytes

    def sampled_version(self) -> AdapterVersion | None:
        """See `VersionedGeneration.sampled_version`."""
        return self.sampler.current


class MergedSync(VersionedGeneration):
    """Every weight goes to the sampler, adapters merged in."""

    _num_bytes = 0
    """Handed out since the transfer began."""

    def sync_weights(self) -> None:
        """See `VersionedGeneration.sync_weights`; the trainer's adapter is unmerged afterwards,
        whatever happens."""
        frozen = {
            layer: layer.get_base_layer().weight.detach().clone() for layer in self._tuner_layers()
        }
        try:
            super().sync_weights()
        finally:
            # Already done when TRL's iterator was read to its end.
            if any(layer.merged for layer in frozen):
                self.model.unmerge_adapter()
            # A merge that is taken back rounds; what isn't trained stays what it was, to the bit.
            for layer, weight in frozen.items():
                layer.get_base_layer().weight.data.copy_(weight)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = getattr(torch, self.settings.spec.dtype)
        for name, tensor in super()._iter_named_params():
            copy = tensor.to(dtype, copy=True)
            self._num_bytes += copy.nbytes
            if self.on_wire is not None:
                self.on_wire(name, copy)
            yield name, copy

    def _tuner_layers(self) -> Iterator[BaseTunerLayer]:
        return (module for module in self.model.modules() if isinstance(module, BaseTunerLayer))
