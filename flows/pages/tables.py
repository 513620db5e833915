"""The table that a stage shows in the Prefect UI: what its page says in words, to search and sort.

Stages name a table of figures that they write, or rows; the others show every figure of their
summary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ratchet.pipeline.stage import Row
from ratchet.pipeline.stages import STAGES
from ratchet.store.store import Artifact

MAX_STEPS = 200
"""Training steps shown, evenly spread."""
TRAINING_COLUMNS = (
    "step", "loss", "reward", "strict", "lenient", "dev_strict", "live_share",
    "status/parse_failure", "truncated_share", "mean_tokens", "drift_mean", "drift_max",
    "dropped_share", "effective_sample_share", "grad_norm", "tokens_per_second", "step_seconds",
)  # fmt: skip
"""Of the metrics table, besides each reward's mean; a run may lack some."""


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _flat(value: Any, path: str = "") -> Iterator[Row]:
    """A row per figure of a nested summary."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path} / {name}" if path else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value, start=1):
            yield from _flat(inner, f"{path} {number}")
    else:
        yield {"figure": path.replace("_", " "), "value": _rounded(value)}


def _training(rows: Sequence[Row]) -> list[Row]:
    """Steps of a metrics table, the columns that matter."""
    rewards = [name for name in rows[0] if name.startswith("rewards/") and name.endswith("/mean")]
    columns = [name for name in (*TRAINING_COLUMNS, *rewards) if name in rows[0]]
    every = -(-len(rows) // MAX_STEPS)
    return [{name: _rounded(row[name]) for name in columns} for row in rows[::every]]


def stage_table(artifact: Artifact) -> list[Row]:
    """The rows that a stage shows."""
    manifest = artifact.manifest
    shown = STAGES[manifest.stage].table
    if shown is None:
        return list(_flat(manifest.summary))
    rows = artifact.table(shown).to_pylist() if isinstance(shown, str) else shown(manifest.summary)
    if shown == "metrics":
        return _training(rows)
    return [{name: _rounded(value) for name, value in row.items()} for row in rows]
