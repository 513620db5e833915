"""Reward functions as a trainer calls them: named, weighted, and checked value by value.

What a reward returns goes straight into the gradient, so a value that is no finite number stops
the run with the reward's name instead of poisoning a batch. `None` (not applicable) passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ratchet.errors import UserError
from ratchet.rewards.functions import RewardFunction
from ratchet.rewards.weights import default_weights, resolve_rewards
from ratchet.verifier import Style


class CheckedReward:
    """A reward function under its configured name."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.__name__ = name
        self.function = function

    def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
        """One value per completion; UserError for a wrong number of values or a non-finite one."""
        values = list(self.function(completions, **columns))
        if len(values) != len(completions):
            raise UserError(
                f"reward '{self.__name__}' returned {len(values)} values for {len(completions)} "
                "completions: it must return one per completion"
            )
        for value in values:
            if value is not None and not math.isfinite(value):
                raise UserError(
                    f"reward '{self.__name__}' returned {value}: return a finite number, or None "
                    "where the reward does not apply"
                )
        return values


def checked_rewards(
    weights: Mapping[str, float] | None, style: Style
) -> tuple[list[CheckedReward], list[float]]:
    """Reward functions and their weights; the style's own where the run sets none."""
    found = resolve_rewards(weights or default_weights(style))
    return [CheckedReward(name, function) for name, function, _ in found], [
        weight for _, _, weight in found
    ]
