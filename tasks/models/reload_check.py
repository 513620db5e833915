"""Does a saved checkpoint say what the trained model said?

The log-probability of every token of a few fixed texts is computed with the model in memory, as it
was trained (adapter unmerged, master weights), and again with the checkpoint loaded from disk in
the dtype in which it will be sampled. A lost, unmerged or misnamed tensor shows as a difference far
above rounding. Texts go through one at a time, so that padding plays no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

BOUND = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest mean |Δ log p| per token that passes, in nats, by the dtype of the reloaded model.
float32 leaves room for the rounding of a merge; bfloat16 for rounding all weights once."""


@dataclass(frozen=True)
class ReloadCheck:
    """How far the reloaded checkpoint is from the trained model, in nats per token."""

    mean_difference: float
    max_difference: float
    num_tokens: int

    def summary(self) -> dict[str, float | int]:
        """Figures for a stage's summary."""
        return {
            "reload_mean_difference": self.mean_difference,
            "reload_max_difference": self.max_difference,
            "reload_num_tokens": self.num_tokens,
        }


def fixed_logprobs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[float]:
    """Log-probability in nats of every token but the first of every text, text after text.

    Computed in the model's own dtype, in evaluation mode, the softmax in float32.
    """
    was_training = model.training
    model.eval()
    found: list[float] = []
    with torch.no_grad():
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")
            ids = ids.to(model.device)
            logits = model(input_ids=ids).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])
            found.extend(chosen[:, 0].tolist())
    model.train(was_training)
    return found


def compare(before: Sequence[float], after: Sequence[float]) -> ReloadCheck:
    """Mean and largest absolute difference of two lists of log-probabilities."""
    assert len(before) == len(after) > 0, (len(before), len(after))
    differences = [abs(a - b) for a, b in zip(before, after, strict=True)]
    # max() would skip a NaN that is not first; sum() keeps it
    total = sum(differences)
    largest = max(differences) if total == total else float("nan")
    return ReloadCheck(total / len(differences), largest, len(differences))


def compare_reloaded(
    before: Sequence[float],
    folder: Path,
    texts: Sequence[str],
    *,
    dtype: str,
    attention: str,
    device: Any = "cpu",
) -> ReloadCheck:
    """Load model and tokenizer from `folder`, compare with `before = fixed_logprobs(trained, …)`.

    RuntimeError when the mean difference is above `BOUND[dtype]` (or isn't a number), or when the
    saved tokenizer reads the texts as another number of tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).to(device)
    after = fixed_logprobs(model, tokenizer, texts)
    if len(after) != len(before):
        raise RuntimeError(
            f"the tokenizer saved in {folder} reads the fixed texts as {len(after)} tokens, "
            f"the one trained with as {len(before)}"
        )
    check = compare(before, after)
    if not check.mean_difference <= BOUND[dtype]:
        raise RuntimeError(
            f"the checkpoint in {folder} is not the model that was trained: log-probabilities "
            f"differ by {check.mean_difference:.2e} nats per token on average, "
            f"{check.max_difference:.2e} at most, over {check.num_tokens} tokens "
            f"({dtype}: at most {BOUND[dtype]:.0e} may pass)"
        )
    return check
