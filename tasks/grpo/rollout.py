"""What was sampled for a step, what it is worth, and how it is written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ratchet.verifier import Verdict
from ratchet.verifier.types import status_rates
from tasks.grpo.figures import live_groups


@dataclass(frozen=True)
class Scoring:
    """How completions are rewarded and grouped in a run."""

    group_size: int
    reward_names: tuple[str, ...]
    weights: torch.Tensor
    """Shape (reward functions,)."""
    end_ids: frozenset[int]
    """Tokens that end a completion."""


@dataclass(frozen=True)
class Rollout:
    """What one process sampled in one go: whole groups or its slice of them, side by side."""

    inputs: list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    verdicts: list[Verdict]
    rewards: torch.Tensor
    """Shape (completions, reward functions); NaN where a reward does not apply."""
    scoring: Scoring

    @property
    def totals(self) -> torch.Tensor:
        """Weighted sums of rewards, shape (completions,); NaN where none applies."""
        totals = (self.rewards * self.scoring.weights).nansum(dim=1)
        return totals.masked_fill(self.rewards.isnan().all(dim=1), math.nan)

    @property
    def live(self) -> torch.Tensor:
        """Which groups have rewards that differ, shape (groups,)."""
        return live_groups(self.totals, self.scoring.group_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(map(len, self.completion_ids))

    def truncated(self, index: int) -> bool:
        """Whether a completion was cut off."""
        return self.completion_ids[index][-1] not in self.scoring.end_ids

    def answer_shares(self) -> dict[str, float]:
        """Figures that are means over completions: accuracy, statuses, lengths."""
        count = len(self.completions)
        shares = {
            "strict": sum(verdict.strict for verdict in self.verdicts) / count,
            "lenient": sum(verdict.lenient for verdict in self.verdicts) / count,
            "truncated_share": sum(map(self.truncated, range(count))) / count,
            "mean_tokens": self.num_tokens / count,
        }
        rates = status_rates(verdict.status for verdict in self.verdicts)
        return shares | {f"status/{status}": rate for status, rate in rates.items()}

    def live_shares(self) -> dict[str, float]:
        """Share of live groups, and of the tokens that lie in them."""
        in_live = self.live.repeat_interleave(self.scoring.group_size).tolist()
        lengths = [len(ids) for ids in self.completion_ids]
        tokens = sum(n for n, on in zip(lengths, in_live, strict=True) if on)
        return {
            "live_share": sum(in_live) / len(in_live),
            "live_token_share": tokens / self.num_tokens,
        }

    def rows(
        self, step: int, *, first: int = 0, advantages: Sequence[float] | None
    ) -> list[dict[str, Any]]:
        """Rows of the `rollouts` table for the batch of `step`, sampled one step earlier's policy.

        `first` is the position of this process's completions in the batch; `advantages` is None
        for what was sampled and not trained on.
        """
        totals = self.totals.tolist()
        return [
            {
                "step": step,
                "question_id": row["question_id"],
                "sample_index": (first + i) % self.scoring.group_size,
                "prompt": row["prompt"],
                "completion": self.completions[i],
                "num_tokens": len(self.completion_ids[i]),
                "finish_reason": "length" if self.truncated(i) else "stop",
                "status": self.verdicts[i].status.value,
                "strict": self.verdicts[i].strict,
                "lenient": self.verdicts[i].lenient,
                "reward": finite(totals[i]),
                "advantage": None if advantages is None else advantages[i],
                "policy_version": step - 1,
                **{
                    f"reward_{name}": finite(value)
                    for name, value in zip(
                        self.scoring.reward_names, self.rewards[i].tolist(), strict=True
                    )
                },
            }
            for i, row in enumerate(self.inputs)
        ]


def finite(value: float | None) -> float | None:
    """The value, None for what is no finite number."""
    return value if value is not None and math.isfinite(value) else None
