"""The waste ledger: which sampled tokens could teach nothing, and what they cost.

Each token is counted once, under the first heading that applies. Device time is the stage's,
shared out by tokens: an estimate, since a stage's time isn't all sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.store.store import Artifact

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

SAME_REWARD = 1e-6
"""Rewards closer than this are equal."""


@dataclass(frozen=True)
class Entry:
    """One heading of one phase."""

    phase: str
    heading: str
    useful: bool
    tokens: int
    share: float
    """Of the phase's tokens."""
    device_seconds: float


def live_rows(rewards: np.ndarray, sample_index: np.ndarray) -> np.ndarray:
    """Which rows of a rollouts table lie in a group whose rewards differ.

    A group starts at sample 0 and its rows stand side by side; NaN (no reward applied) is left
    out. Returns booleans of shape [rows].
    """
    import numpy as np

    starts = np.flatnonzero(sample_index == 0)
    highest = np.maximum.reduceat(np.where(np.isnan(rewards), -np.inf, rewards), starts)
    lowest = np.minimum.reduceat(np.where(np.isnan(rewards), np.inf, rewards), starts)
    sizes = np.diff(np.append(starts, len(rewards)))
    return np.repeat(highest - lowest > SAME_REWARD, sizes)


def _entries(
    phase: str, parts: list[tuple[str, bool, float]], device_seconds: float
) -> list[Entry]:
    total = sum(tokens for _, _, tokens in parts)
    return [
        Entry(
            phase, heading, useful, round(tokens), tokens / total, device_seconds * tokens / total
        )
        for heading, useful, tokens in parts
        if total
    ]


def grpo_ledger(rollouts: pa.Table, metrics: pa.Table, device_seconds: float) -> list[Entry]:
    """What became of the tokens sampled during RL.

    Completions that the importance mask dropped are known per step as a share (`dropped_share`);
    that share of the step's remaining tokens is booked as dropped.
    """
    import numpy as np

    tokens = rollouts.column("num_tokens").to_numpy().astype(float)
    rewards = rollouts.column("reward").to_numpy().astype(float)
    live = live_rows(rewards, rollouts.column("sample_index").to_numpy())
    cut = np.asarray(rollouts.column("finish_reason").to_pylist()) == "length"
    dropped_of: dict[int, float] = {}
    if "dropped_share" in metrics.column_names:
        steps = metrics.column("step").to_pylist()
        shares = metrics.column("dropped_share").to_pylist()
        dropped_of = {step: share or 0.0 for step, share in zip(steps, shares, strict=True)}
    step = rollouts.column("step").to_pylist()
    dropped = np.array([dropped_of.get(one, 0.0) for one in step])
    rest = tokens * (live & ~cut)
    return _entries(
        "GRPO rollouts",
        [
            ("groups without reward variance", False, float(tokens[~live].sum())),
            ("cut-off completions in live groups", False, float(tokens[live & cut].sum())),
            ("dropped by the importance mask", False, float((rest * dropped).sum())),
            ("trained on", True, float((rest * (1 - dropped)).sum())),
        ],
        device_seconds,
    )


def presample_ledger(scores: pa.Table, selection: pa.Table, device_seconds: float) -> list[Entry]:
    """What became of the tokens sampled before training."""
    import numpy as np
    import pyarrow.compute as pc

    row = pc.index_in(
        scores.column("question_id").combine_chunks(),
        value_set=selection.column("question_id").combine_chunks(),
    ).to_numpy()
    tokens = scores.column("num_tokens").to_numpy().astype(float)
    bucket = np.asarray(selection.column("bucket").to_pylist())[row]
    in_rl = np.asarray(selection.column("role").to_pylist())[row] == "rl"
    parts: list[tuple[str, bool, float]] = [
        (
            f"questions {name.replace('_', ' ')}",
            False,
            float(tokens[~in_rl & (bucket == name)].sum()),
        )
        for name in ("always_wrong", "always_right", "live")
    ]
    parts[2] = ("live questions outside the filter's bounds", *parts[2][1:])
    parts.append(("questions that RL trains on", True, float(tokens[in_rl].sum())))
    return _entries("presampling", [part for part in parts if part[2]], device_seconds)


def ledger(inputs: Mapping[str, Artifact]) -> list[Entry]:
    """All phases that sampled, in the order in which they ran; `inputs` by node name."""
    grpo = inputs["grpo"]
    before = []
    if "presample" in inputs:
        before = presample_ledger(
            inputs["score"].table("scores", ["question_id", "num_tokens"]),
            inputs["filter"].table("selection", ["question_id", "bucket", "role"]),
            inputs["presample"].manifest.device_seconds,
        )
    return before + grpo_ledger(
        grpo.table(
            "rollouts",
            ["step", "question_id", "sample_index", "num_tokens", "reward", "finish_reason"],
        ),
        grpo.table("metrics"),
        grpo.manifest.device_seconds,
    )
