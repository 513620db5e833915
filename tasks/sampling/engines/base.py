"""What every engine offers, and what the engines share.

A call of `generate` is a pure function of model, prompts, n, temperature, shaping, max_tokens and
seed: earlier calls leave no trace in it. Nothing but `shaping` truncates the distribution (top_p,
top_k, min_p) or penalises tokens, whatever the checkpoint's generation config says. Imports nothing
heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ratchet.errors import UserError
from tasks.models.checkpoints import ModelLocation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnProgress = Callable[[int, int], None]
"""Told how many completions of the call are finished and how many tokens they have."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """What reshapes the model's distribution before a token is drawn, in the field's usual terms.
    As it is here, nothing does."""

    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


PLAIN = Shaping()


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    text: str
    """Decoded without special tokens and without the token that ended it."""
    token_ids: list[int]
    """As sampled, the ending token included."""
    finish_reason: Literal["stop", "length"]
    """'stop' when the model ended the completion itself."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is opened with."""

    location: ModelLocation
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    dtype: str
    max_model_len: int
    """Prompt and completion together, in tokens."""
    max_num_seqs: int
    """Sequences generated at once."""
    gpu_memory_utilization: float


class Sampler(Protocol):
    """A loaded model that generates."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        shaping: Shaping = PLAIN,
        on_progress: OnProgress | None = None,
    ) -> list[list[Sample]]:
        """`n` completions of each prompt, in the order of the prompts.

        Temperature 0 is greedy decoding, of which `shaping` changes only what its repetition
        penalty changes. UserError when a prompt leaves too little room for
        `max_tokens` in the context that the engine was opened with.
        """
        ...

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each completion token given all before it, at
        temperature 1."""
        ...


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    """UserError when the longest prompt and `max_tokens` don't fit into the context."""
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + max_tokens > max_model_len:
        raise UserError(
            f"the longest prompt has {longest} tokens and with sampler.max_completion_tokens = "
            f"{max_tokens} exceeds the context of {max_model_len}: lower "
            "questions.max_prompt_tokens or sampler.max_completion_tokens, or raise "
            "model.max_model_len if the model allows it"
        )


def finished(spec: EngineSpec, token_ids: list[int]) -> tuple[list[int], Literal["stop", "length"]]:
    """The tokens up to and with the first that ends a completion, and why it ended."""
    for position, token in enumerate(token_ids):
        if token in spec.stop_ids:
            return token_ids[: position + 1], "stop"
    return token_ids, "length"


def as_samples(spec: EngineSpec, completions: Sequence[list[int]]) -> list[Sample]:
    """Sampled token ids as completions; what follows an ending token is dropped."""
    ended = [finished(spec, list(token_ids)) for token_ids in completions]
    bodies = [ids[:-1] if reason == "stop" else ids for ids, reason in ended]
    texts = spec.tokenizer.batch_decode(
        bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [Sample(text, ids, reason) for text, (ids, reason) in zip(texts, ended, strict=True)]
