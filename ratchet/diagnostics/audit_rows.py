"""Table 'audit', boiled down for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def worst_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row of table 'audit' per probe, check and group, by probe: the worst of all syncs."""
    worst: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["probe"], row["check"], row["group"])
        if key not in worst or _badness(row) > _badness(worst[key]):
            worst[key] = row
    return sorted(worst.values(), key=lambda row: str(row["probe"]))


def _badness(row: Mapping[str, Any]) -> tuple[bool, float]:
    return not row["ok"], float(row["value"])
