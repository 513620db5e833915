"""What every training step leaves on disk, one file per step and kind.

A step's file appears whole (written aside, then renamed), so a killed run loses at most the step
it was in. A resumed run first forgets the steps after its checkpoint and then writes them again:
the final tables have no gap and no step twice.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.store.schemas import read_table, to_table, write_table
from ratchet.store.store import write_durably

if TYPE_CHECKING:
    import pyarrow as pa

METRICS = "metrics"
ROLLOUTS = "rollouts"


class TrainingLog:
    """Metrics and rollouts of a training run, by optimizer step (from 1)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def forget_after(self, step: int) -> None:
        """Remove what was written after `step`."""
        for path in self.folder.glob("*-*.*"):
            if int(path.stem.split("-")[1]) > step:
                path.unlink()

    def write_metrics(self, step: int, row: dict[str, float | int | None]) -> None:
        """Keep the figures of a step."""
        write_durably(self.folder / f"{METRICS}-{step:07d}.json", json.dumps(row))

    def write_rollouts(self, step: int, rank: int, rows: list[dict[str, Any]]) -> None:
        """Keep the completions that process `rank` sampled for `step`."""
        path = self.folder / f"{ROLLOUTS}-{step:07d}-{rank}.parquet"
        unfinished = self.folder / f".{path.name}.{secrets.token_hex(4)}"
        write_table(unfinished, ROLLOUTS, to_table(ROLLOUTS, rows))
        unfinished.replace(path)

    def rollouts_of(self, step: int) -> list[dict[str, Any]]:
        """The completions sampled for a step."""
        paths = sorted(self.folder.glob(f"{ROLLOUTS}-{step:07d}-*.parquet"))
        return [row for path in paths for row in read_table(path, ROLLOUTS).to_pylist()]

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the `metrics` table; every step from the first to the last is there."""
        paths = sorted(self.folder.glob(f"{METRICS}-*.json"))
        rows: list[dict[str, Any]] = [json.loads(path.read_text("utf-8")) for path in paths]
        steps = [row["step"] for row in rows]
        assert steps == list(range(1, len(rows) + 1)), f"steps with metrics: {steps}"
        return rows

    def first(self, name: str) -> float | None:
        """A figure of the first step, if that step has ended."""
        path = self.folder / f"{METRICS}-{1:07d}.json"
        if not path.exists():
            return None
        found: float | None = json.loads(path.read_text("utf-8")).get(name)
        return found

    def rollouts(self) -> pa.Table:
        """The `rollouts` table."""
        import pyarrow as pa

        paths = sorted(self.folder.glob(f"{ROLLOUTS}-*.parquet"))
        return pa.concat_tables([read_table(path, ROLLOUTS) for path in paths])
