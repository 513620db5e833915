"""Faults that make a sampler another policy than its trainer, put into real engines.

Not a test module. Each function is a context manager around a `Pair`; while it lasts the fault is
there. What happens is what happens in the field: the tensors that go over the wire, what the engine
does with them, what a request says, are changed at the place where the fault has been seen.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tasks.sync.adapter import AdapterVersion
from tasks.sync.engine import AdapterLLM, worker_of
from tasks.sync.versioned import MergedSync, VersionedGeneration
from tests.support.audited import Pair
from tests.support.stock_packing import WithoutSampler, ship_from

Tensors = Iterator[tuple[str, torch.Tensor]]
Fault = Callable[[Pair], AbstractContextManager[None]]


@contextmanager
def _sending(pair: Pair, tensors: Callable[[], Tensors], *, tell: bool = True) -> Iterator[None]:
    """Merged sync sends `tensors`; with `tell` the audit's tap sees them as they arrive."""
    backend = pair.generation

    def sent() -> Tensors:
        for name, tensor in tensors():
            if tell and backend.on_wire is not None:
                backend.on_wire(name, tensor)
            yield name, tensor

    with patch.object(backend, "_iter_named_params", sent):
        yield


def _whole(pair: Pair) -> Tensors:
    """What merged sync sends when nothing is wrong, the tap left out."""
    backend = pair.generation
    tap, backend.on_wire = backend.on_wire, None
    found = list(type(backend)._iter_named_params(backend))
    backend.on_wire = tap
    yield from found


def _stock(pair: Pair, buffer_bytes: int) -> Tensors:
    stock = WithoutSampler(pair.trainer.model, pair.trainer.accelerator, None)  # type: ignore[arg-type]
    yield from ship_from(stock, buffer_bytes)


def unmerged_before_packed(buffer_bytes: int) -> Fault:
    """TRL's server mode: its iterator and vLLM's packer, with a buffer of `buffer_bytes`."""

    def fault(pair: Pair) -> AbstractContextManager[None]:
        return _sending(pair, lambda: _stock(pair, buffer_bytes))

    return fault


@contextmanager
def unmerged_behind_the_tap(pair: Pair) -> Iterator[None]:
    """The same where only what is handed to the packer can be watched: that is merged still."""
    backend = pair.generation

    def sent() -> Tensors:
        if backend.on_wire is not None:
            for name, tensor in _whole(pair):
                backend.on_wire(name, tensor)
        yield from _stock(pair, 2**30)

    with patch.object(backend, "_iter_named_params", sent):
        yield


def bfloat16_on_the_wire(pair: Pair) -> AbstractContextManager[None]:
    """Tensors in bfloat16 for an engine in float32."""
    return _sending(pair, lambda: ((name, value.bfloat16()) for name, value in _whole(pair)))


def layer_left_out(pair: Pair) -> AbstractContextManager[None]:
    """A layer's tensors aren't sent."""
    return _sending(pair, lambda: (one for one in _whole(pair) if "layers.1.mlp" not in one[0]))


@contextmanager
def adapter_layer_left_out(pair: Pair) -> Iterator[None]:
    """The adapter's file lacks a layer."""
    from tasks.sync import adapter

    def short(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        found = whole(*args, **kwargs)
        return {name: value for name, value in found.items() if "layers.1.mlp" not in name}

    whole = adapter.get_peft_model_state_dict
    with patch.object(adapter, "get_peft_model_state_dict", short):
        yield


@contextmanager
def lora_dropout(pair: Pair) -> Iterator[None]:
    """Dropout of 0.1 on the adapter's inputs."""
    layers = [m.lora_dropout for m in pair.trainer.model.modules() if hasattr(m, "lora_dropout")]
    before = [layer["default"] for layer in layers]
    for layer in layers:
        layer["default"] = torch.nn.Dropout(0.1)
    yield
    for layer, old in zip(layers, before, strict=True):
        layer["default"] = old


@contextmanager
def unseen_dropout(pair: Pair) -> Iterator[None]:
    """The same, where P0 doesn't recognise it."""
    with lora_dropout(pair), patch("tasks.audit.configuration.dropouts", lambda model: []):
        yield


@contextmanager
def update_not_carried_out(pair: Pair) -> Iterator[None]:
    """The engine takes every tensor, says that all is well, and keeps what it had."""

    def reload_weights(weights_iterator: Tensors) -> None:
        for _ in weights_iterator:
            pass

    with patch.object(worker_of(pair.llm), "reload_weights", reload_weights):
        yield


@contextmanager
def adapter_not_loaded(pair: Pair) -> Iterator[None]:
    """The engine knows the new version's name and holds the weights of the first one."""
    root = pair.generation.versions.root
    kept = root.parent / "first version"
    use = AdapterLLM.use

    def used(llm: AdapterLLM, version: AdapterVersion) -> None:
        if not kept.exists():
            shutil.copytree(version.folder, kept)
        new = version.folder.with_name("new")
        version.folder.rename(new)
        shutil.copytree(kept, version.folder)
        use(llm, version)
        shutil.rmtree(version.folder)
        new.rename(version.folder)

    with patch.object(AdapterLLM, "use", used):
        yield
    shutil.rmtree(kept)


@contextmanager
def cache_not_reset(pair: Pair) -> Iterator[None]:
    """The prefix cache says that it was emptied and wasn't."""
    with patch.object(pair.llm, "reset_prefix_cache", lambda: True):
        yield


@contextmanager
def head_not_renewed(pair: Pair) -> Iterator[None]:
    """vLLM's CPU backend as it is: a tied head keeps a packed copy of its own."""

    def reload() -> None:
        worker = worker_of(pair.llm)
        worker.reload_weights(weights_iterator=pair.generation._iter_named_params())

    with patch.object(pair.generation, "_reload", reload):
        yield


def merge_taken_back(pair: Pair) -> AbstractContextManager[None]:
    """TRL's sync: the adapter is merged into the weights and subtracted again."""
    return patch.object(MergedSync, "sync_weights", VersionedGeneration.sync_weights)


def nothing(pair: Pair) -> AbstractContextManager[None]:
    """The fault is in how the pair was made."""

    @contextmanager
    def untouched() -> Iterator[None]:
        yield

    return untouched()


def rounded_to(num_bits: int) -> Fault:
    """The engine's linear weights rounded to `num_bits`, each output with a scale of its own,
    between wire and engine."""
    levels = 2 ** (num_bits - 1) - 1

    def quantised(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.ndim != 2 or "embed" in name:
            return value
        scale = value.abs().amax(dim=1, keepdim=True) / levels
        return (value / scale).round() * scale

    @contextmanager
    def fault(pair: Pair) -> Iterator[None]:
        worker = worker_of(pair.llm)
        reload = worker.reload_weights

        def rounding(weights_iterator: Tensors) -> None:
            reload(weights_iterator=((n, quantised(n, v)) for n, v in weights_iterator))

        with patch.object(worker, "reload_weights", rounding):
            yield

    return fault


LEAKED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
"""What Qwen's generation config holds."""


def sampling_defaults_told(pair: Pair) -> AbstractContextManager[None]:
    """Requests carry a generation config's parameters, and it can be seen."""
    return patch.dict(pair.generation.generation_kwargs, LEAKED)


@contextmanager
def sampling_defaults_leaked(pair: Pair) -> Iterator[None]:
    """The engine puts a generation config's parameters into every request, behind the trainer."""
    generate = AdapterLLM.generate

    def leaking(llm: AdapterLLM, *args: Any, sampling_params: Any, **kwargs: Any) -> Any:
        if sampling_params.prompt_logprobs is None:
            sampling_params = sampling_params.clone()
            for name, value in LEAKED.items():
                setattr(sampling_params, name, value)
        return generate(llm, *args, sampling_params=sampling_params, **kwargs)

    with patch.object(AdapterLLM, "generate", leaking):
        yield


@contextmanager
def leaked_under_raw_logprobs(pair: Pair) -> Iterator[None]:
    """The same with raw log-probabilities, which don't show it; nor does the engine say so."""
    facts = type(pair.generation).facts

    def claimed(backend: Any) -> Any:
        return replace(facts(backend), logprobs_mode="processed_logprobs")

    with (
        sampling_defaults_leaked(pair),
        raw_logprobs(pair),
        patch.object(type(pair.generation), "facts", claimed),
    ):
        yield


@contextmanager
def raw_logprobs(pair: Pair) -> Iterator[None]:
    """The engine reports log-probabilities before temperature and truncation."""
    sampler = worker_of(pair.llm).model_runner.sampler
    with (
        patch.object(sampler, "logprobs_mode", "raw_logprobs"),
        patch.object(sampler.topk_topp_sampler, "logprobs_mode", "raw_logprobs"),
    ):
        yield
