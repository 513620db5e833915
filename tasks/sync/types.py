"""What passes between a trainer and its sampler, wherever that one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

OnWire = Callable[[str, torch.Tensor], None]
"""Told the name and value of each tensor as it reaches the sampler's side."""
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""What of a request's parameters changes the distribution that is sampled from."""


class ServerError(RuntimeError):
    """The vLLM server ended, does not answer or refused; the first line says which, then follows
    the end of its log."""


@dataclass(frozen=True)
class SyncRecord:
    """One transfer of weights to the sampler."""

    policy_version: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Sampled:
    """One completion as the sampler gave it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token as the sampler reported it with the completion."""
    num_cached_tokens: int | None
    """Prompt tokens whose keys and values came out of the prefix cache; None if not told."""


def as_sampled(answer: tuple[Any, ...], cached: Iterable[int | None]) -> list[Sampled]:
    """What `generate` of TRL's backend answered; `cached` are the tokens that each prompt took out
    of the prefix cache."""
    prompts, completions, logprobs, _ = answer
    return [
        Sampled(list(prompt), list(ids), [one[0] for one in values], num_cached)
        for prompt, ids, values, num_cached in zip(
            prompts, completions, logprobs, cached, strict=True
        )
    ]


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

    @classmethod
    def of(cls, model: Any, cache: Any, lora: Any, **others: Any) -> EngineFacts:
        """The facts in vLLM's own configurations of model, cache and adapters, and the others."""
        return cls(
            dtype=str(model.dtype).removeprefix("torch."),
            kv_cache_dtype=cache.cache_dtype,
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            block_size=cache.block_size,
            prefix_caching=bool(cache.enable_prefix_caching),
            lora_rank=None if lora is None else lora.max_lora_rank,
            **others,
        )
