"""The token budget: training ends with the step in which it is spent.

Algorithms that sample differently much per step (dynamic sampling above all) are compared fairly
at equal generated tokens, not at equal steps. Every completion counts, trained on or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from tasks.grpo.trainer import RolloutTrainer

SAMPLED_TOKENS = "sampled_tokens"


def tokens_of(metrics: Sequence[Mapping[str, Any]]) -> int:
    """Tokens generated in the steps of a `metrics` table; a second pass over a batch has none."""
    return int(sum(row.get(SAMPLED_TOKENS) or 0 for row in metrics))


class TokenBudget(TrainerCallback):
    """Ends training, with a checkpoint, after the step that brings the tokens to `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.spent = 0
        self.trainer: RolloutTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer, also when it continues from a checkpoint."""
        assert self.trainer is not None
        self.spent = tokens_of(self.trainer.records.metrics())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after the weights have changed, before the step is logged."""
        assert self.trainer is not None
        self.spent += int(sum(self.trainer._metrics["train"].get(SAMPLED_TOKENS, [])))
        if self.spent >= self.max_tokens:
            control.should_save = control.should_training_stop = True
