"""Figures of a batch of rollouts: live groups, and how far sampler and trainer are apart.

Ratios are w = exp(log p(trainer) − log p(sampler)) of a whole completion; TRL's sequence mask sets
w to zero where it leaves its bounds, which drops the completion from the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

SAME_REWARD = 1e-6
"""Rewards closer than this are equal."""


def live_groups(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Which groups have rewards that differ.

    `rewards` has shape (groups × group_size,), a group's completions side by side; NaN (unscorable)
    is left out. Returns booleans of shape (groups,).
    """
    grouped = rewards.view(-1, group_size)
    missing = grouped.isnan()
    highest = grouped.masked_fill(missing, -torch.inf).amax(dim=1)
    lowest = grouped.masked_fill(missing, torch.inf).amin(dim=1)
    return highest - lowest > SAME_REWARD


def effective_share(weights: torch.Tensor) -> float:
    """Effective sample size (Kish), (Σw)² / Σw², as a share of the number of weights; 0 if all
    are zero."""
    squares = weights.square().sum()
    if squares == 0:
        return 0.0
    return float(weights.sum().square() / squares / weights.numel())


def mean_and_error(values: torch.Tensor, expected: float) -> tuple[float, float]:
    """Mean of one value per sampled token, and its standard error.

    Each value's expectation is `expected` given the tokens before it. Deviations of such values
    (martingale differences) are uncorrelated, also within a completion, so the variance of their
    sum is the sum of their squares.
    """
    error = (values - expected).square().sum().sqrt() / values.numel()
    return float(values.mean()), float(error)


def sampling_figures(scored: dict[str, Any]) -> dict[str, float]:
    """Drift and importance-sampling figures of a scored batch; nothing where the trainer's own
    weights did the sampling.

    `unmasked_ratio_mean` is the mean over tokens of p(trainer) / p(sampler), before any mask.
    """
    if "sampling_per_token_logps" not in scored:
        return {}
    mask = scored["completion_mask"].bool()
    difference = (scored["old_per_token_logps"] - scored["sampling_per_token_logps"])[mask]
    difference = difference.nan_to_num(0.0).double()
    used = scored["importance_sampling_ratio"].flatten()
    ratio_mean, ratio_error = mean_and_error(difference.exp(), 1.0)
    return {
        "drift_mean": float(difference.abs().mean()),
        "drift_max": float(difference.abs().max()),
        "dropped_share": float((used == 0).float().mean()),
        "effective_sample_share": effective_share(used),
        "unmasked_ratio_mean": ratio_mean,
        "unmasked_ratio_se": ratio_error,
    }


RARE_NATS = 4.0
"""−log p of a rare token where the policy is nearly sure. Those that happened not to be drawn leave
no trace in the squares, so a variance is taken to be at least this times the entropy, up to 1; a
broad distribution's own squares are larger than that."""


@dataclass
class Surprise:
    """log p of the sampled tokens plus the entropy where they were sampled, gathered over the
    micro-batches of a step: 0 on average if the trainer's distribution is the one sampled from."""

    gaps: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)

    def add(self, logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor) -> None:
        """Take in a micro-batch; all of shape (completions, tokens)."""
        on = mask.bool()
        self.gaps.append((logps.detach() + entropies.detach())[on].double())
        self.entropies.append(entropies.detach()[on].double())

    def take(self) -> tuple[float, float]:
        """Mean and standard error, in nats; what was gathered is forgotten."""
        gaps, entropies = torch.cat(self.gaps), torch.cat(self.entropies)
        self.gaps.clear()
        self.entropies.clear()
        variances = torch.maximum(gaps.square(), (RARE_NATS * entropies).clamp(max=1.0))
        return float(gaps.mean()), float(variances.sum().sqrt() / gaps.numel())
