"""Figures of a batch of rollouts: live groups, and how far sampler and trainer are apart.

Ratios are w = exp(log p(trainer) − log p(sampler)) of a whole completion; TRL's sequence mask sets
w to zero where it leaves its bounds, which drops the completion from the gradient.
"""

from __future__ import annotations

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


def sampling_figures(scored: dict[str, Any]) -> dict[str, float]:
    """Drift and importance-sampling figures of a scored batch; nothing where the trainer's own
    weights did the sampling."""
    if "sampling_per_token_logps" not in scored:
        return {}
    mask = scored["completion_mask"].bool()
    difference = scored["old_per_token_logps"] - scored["sampling_per_token_logps"]
    difference = difference.masked_fill(~mask, 0.0).nan_to_num(0.0)
    used = scored["importance_sampling_ratio"].flatten()
    return {
        "drift_mean": float(difference.abs().sum() / mask.sum()),
        "drift_max": float(difference.abs().max()),
        "dropped_share": float((used == 0).float().mean()),
        "effective_sample_share": effective_share(used),
        "unmasked_ratio_mean": float(difference.sum(dim=1).exp().mean()),
    }
