"""What a probe reports: a row per check and layer group, and findings for what it can name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.audit.compare import Compared
from tasks.audit.diagnosis import Finding, Probe
from tasks.audit.reference import GROUP_NAMES, group_of

NUM_NAMED = 3
"""Wrong weights that are named."""


@dataclass(frozen=True)
class Row:
    """A row of table `audit`."""

    sync: int
    """Which of the audited syncs, from 1; 0 for what holds before any."""
    probe: Probe
    check: str
    group: str
    """Layer group, or what else was checked."""
    count: int
    """Weights or tokens checked."""
    value: float
    """The worst found."""
    limit: float
    ok: bool
    worst: str
    """Where the worst was found."""

    def as_dict(self) -> dict[str, Any]:
        """Column to value."""
        return {**vars(self), "probe": self.probe.value}


@dataclass
class Report:
    """What one probe, or all of them, reported."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Take another report in."""
        self.rows += other.rows
        self.findings += other.findings


def fact(probe: Probe, check: str, ok: bool, found: str, *, sync: int = 0) -> Row:
    """A row for something that is either so or not; `found` says what was seen."""
    return Row(sync, probe, check, "", 1, 0.0 if ok else 1.0, 0.0, ok, found)


def by_group(sync: int, probe: Probe, check: str, compared: Sequence[Compared]) -> list[Row]:
    """A row per layer group with its worst weight."""
    groups: dict[str, list[Compared]] = {}
    for one in compared:
        groups.setdefault(group_of(one.name), []).append(one)
    rows = []
    for group in GROUP_NAMES:
        if group in groups:
            members = groups[group]
            worst = max(members, key=_badness)
            ok = all(one.ok for one in members)
            count = len(members)
            rows.append(
                Row(sync, probe, check, group, count, worst.error, worst.limit, ok, worst.name)
            )
    return rows


def named(names: Iterable[str]) -> str:
    """The first few names, and how many more."""
    every = list(names)
    more = len(every) - NUM_NAMED
    shown = ", ".join(every[:NUM_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown


def _badness(one: Compared) -> float:
    return one.error / one.limit if one.limit else one.error
