"""What an audit needs of a sampler, whichever way it is reached, and that of a colocated one.

`SamplerHandle` is the whole of what `tasks.audit.probe` and the drift guard know of a sampler:
hand the trainer's weights over, sample, score given tokens, read the weights back. Weights and
log-probabilities go the ways that training uses, not ways of the audit's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm import RequestOutput, SamplingParams

from tasks.sync.engine import worker_of
from tasks.sync.generation import ColocatedGeneration, SyncRecord
from tasks.sync.readback import adapter_slot, effective_weights, vocab_rows

OnWire = Callable[[str, torch.Tensor], None]
"""Told the name and value of each tensor as it reaches the sampler's side."""


@dataclass(frozen=True)
class Sampled:
    """One completion as the sampler gave it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token as the sampler reported it with the completion."""
    num_cached_tokens: int | None
    """Prompt tokens whose keys and values came out of the prefix cache; None if not told."""


@dataclass(frozen=True)
class EngineFacts:
    """How a sampler is set up, as it says itself."""

    mode: str
    """'colocate' or 'server'."""
    dtype: str
    """Number format of weights and activations, such as 'float32'."""
    kv_cache_dtype: str
    """Number format of cached keys and values; 'auto' is that of the model."""
    quantization: str | None
    logprobs_mode: str
    """'processed_logprobs' are those of the distribution that is sampled from."""
    vocab_rows: int
    """Tokens that the softmax runs over."""
    max_model_len: int
    block_size: int
    """Tokens in a block of the prefix cache; shorter prefixes aren't cached."""
    prefix_caching: bool
    lora_rank: int | None
    """Largest rank of adapters; None for an engine without LoRA."""
    sampling: Mapping[str, float | int] | None
    """Parameters of the newest sampling request that change the distribution; None before any."""


class SamplerHandle(Protocol):
    """A sampler under a trainer."""

    def sync(self, step: int, on_wire: OnWire | None = None) -> SyncRecord:
        """Hand the trainer's weights over as version `step`, the way training does."""
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, temperature: float, max_tokens: int
    ) -> list[Sampled]:
        """`n` completions of each prompt, those of a prompt side by side, from the newest
        version, the way training samples."""
        ...

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability at temperature 1 of every token after the first of each sequence, given
        those before it (vLLM's `prompt_logprobs`, which never reads the prefix cache)."""
        ...

    def effective_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in the checkpoint, and value of every weight that the newest version is sampled
        with, adapter included; head and embedding apart even where they are tied."""
        ...

    def facts(self) -> EngineFacts:
        """How the engine is set up."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False when the engine didn't."""
        ...


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sampling_facts(params: SamplingParams) -> dict[str, float | int]:
    """What of a request's parameters changes the distribution that is sampled from."""
    return {name: getattr(params, name) for name in SAMPLING_FIELDS}


@dataclass
class ColocatedHandle:
    """The handle of TRL's backend with an engine in this process."""

    generation: ColocatedGeneration

    def __post_init__(self) -> None:
        self._sampling: dict[str, float | int] | None = None

    @property
    def llm(self) -> Any:
        """The engine."""
        return self.generation.llm

    def sync(self, step: int, on_wire: OnWire | None = None) -> SyncRecord:
        """See `SamplerHandle.sync`."""
        return self.generation.sync_as(step, on_wire)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, temperature: float, max_tokens: int
    ) -> list[Sampled]:
        """See `SamplerHandle.sample`."""
        backend = self.generation
        before = backend.temperature, backend.max_completion_length
        backend.temperature, backend.max_completion_length = temperature, max_tokens
        repeated = [list(prompt) for prompt in prompts for _ in range(n)]
        try:
            with self._watched() as outputs:
                _, completions, logprobs, _ = backend.generate(repeated, None, n)
        finally:
            backend.temperature, backend.max_completion_length = before
        return [
            Sampled(prompt, list(ids), [one[0] for one in values], output.num_cached_tokens)
            for prompt, ids, values, output in zip(
                repeated, completions, logprobs, outputs, strict=True
            )
        ]

    @contextmanager
    def _watched(self) -> Iterator[list[RequestOutput]]:
        """The engine's own answers to what is generated inside."""
        outputs: list[RequestOutput] = []
        generate = self.llm.generate

        def watched(*args: Any, **kwargs: Any) -> list[RequestOutput]:
            found: list[RequestOutput] = generate(*args, **kwargs)
            outputs.extend(found)
            self._sampling = sampling_facts(kwargs["sampling_params"])
            return found

        self.llm.generate = watched
        try:
            yield outputs
        finally:
            del self.llm.generate

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `SamplerHandle.score`."""
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        found = []
        # One by one: the CPU backend's LoRA can't give several prompts' log-probs at once.
        for ids in token_ids:
            (answer,) = self.llm.generate(
                [{"prompt_token_ids": list(ids)}], sampling_params=params, use_tqdm=False
            )
            pairs = zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
            found.append([at[token].logprob for at, token in pairs])
        return found

    def effective_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `SamplerHandle.effective_weights`."""
        worker = worker_of(self.llm)
        version = self.generation.sampled_version()
        slot = None if version is None else adapter_slot(worker, version.adapter_id)
        return effective_weights(worker.get_model(), slot)

    def facts(self) -> EngineFacts:
        """See `SamplerHandle.facts`."""
        config = self.llm.llm_engine.vllm_config
        runner = worker_of(self.llm).model_runner
        return EngineFacts(
            mode="colocate",
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            kv_cache_dtype=config.cache_config.cache_dtype,
            quantization=config.model_config.quantization,
            logprobs_mode=runner.sampler.logprobs_mode,
            vocab_rows=vocab_rows(runner.get_model()),
            max_model_len=config.model_config.max_model_len,
            block_size=config.cache_config.block_size,
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            lora_rank=None if config.lora_config is None else config.lora_config.max_lora_rank,
            sampling=self._sampling,
        )

    def reset_prefix_cache(self) -> bool:
        """See `SamplerHandle.reset_prefix_cache`."""
        return bool(self.llm.reset_prefix_cache())


def handle_of(generation: Any) -> SamplerHandle:
    """The handle of a trainer's generation backend."""
    if isinstance(generation, ColocatedGeneration):
        return ColocatedHandle(generation)
    from tasks.sync.server_handle import ServerHandle

    return ServerHandle(generation)
