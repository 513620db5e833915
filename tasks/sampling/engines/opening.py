"""How a model artifact is sampled (`engine_spec`), and its loading into the configured engine
(`open_sampler`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ratchet.config.run import ModelConfig, SamplerConfig
from ratchet.errors import UserError
from ratchet.store.store import Artifact
from tasks.models.checkpoints import load_tokenizer, model_context, model_location, stop_token_ids
from tasks.sampling.engines.base import EngineSpec, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH_STEP = 64
"""Contexts are rounded up to this many tokens."""


def context_for(own: int | None, config: ModelConfig, need: int | None) -> int:
    """Context to open an engine with: no more than needed, no more than there is.

    `own` is the model's limit and `need` the longest prompt with its completion, in tokens.
    UserError when there is less than needed or no limit is known.
    """
    limits = [limit for limit in (own, config.max_model_len) if limit is not None]
    if not limits:
        raise UserError("the model's config.json names no context length: set model.max_model_len")
    limit = min(limits)
    if need is None:
        return limit
    if need > limit:
        raise UserError(
            f"the longest prompt and sampler.max_completion_tokens need {need} tokens, the "
            f"context has {limit}: lower questions.max_prompt_tokens or "
            "sampler.max_completion_tokens, or raise model.max_model_len if the model allows it"
        )
    return min(limit, -(-need // LENGTH_STEP) * LENGTH_STEP)


def engine_spec(
    model: Artifact,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_config: ModelConfig,
    sampler: SamplerConfig,
    max_prompt_tokens: int | None,
) -> EngineSpec:
    """How an artifact's model is sampled; UserError when its context can't hold the longest prompt
    and its completion."""
    need = None if max_prompt_tokens is None else max_prompt_tokens + sampler.max_completion_tokens
    return EngineSpec(
        location=model_location(model),
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(model, tokenizer),
        dtype=model_config.dtype,
        max_model_len=context_for(model_context(model), model_config, need),
        max_num_seqs=sampler.max_num_seqs,
        gpu_memory_utilization=sampler.gpu_memory_utilization,
    )


@contextmanager
def open_sampler(
    model: Artifact,
    *,
    model_config: ModelConfig,
    sampler: SamplerConfig,
    max_prompt_tokens: int | None = None,
) -> Iterator[Sampler]:
    """The model of an artifact, loaded; closed and its memory freed on leaving.

    `max_prompt_tokens` is the longest prompt to come (the whole context is kept open when left
    out); it changes memory use and no result.
    """
    spec = engine_spec(
        model,
        load_tokenizer(model),
        model_config=model_config,
        sampler=sampler,
        max_prompt_tokens=max_prompt_tokens,
    )
    assert sampler.engine != "auto", "the configuration's loader resolves 'auto'"
    if sampler.engine == "vllm":
        from tasks.sampling.engines.vllm_engine import VllmSampler

        engine = VllmSampler(spec)
        try:
            yield engine
        finally:
            engine.close()
    else:
        from tasks.sampling.engines.transformers_engine import load_sampler

        yield load_sampler(spec, model)
