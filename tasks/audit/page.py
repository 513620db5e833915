"""An audit for people: what was checked, probe by probe and layer group by layer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.diagnostics.audit_rows import worst_rows

PROBES = {
    "P0": "configuration",
    "P1": "what goes on the wire",
    "P2": "the engine's weights, read back",
    "P3": "log-probabilities of the same tokens",
    "P4": "prefix cache",
}


def markdown(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Verdict, figures, and a table with the worst of all syncs per check and group."""
    verdict = (
        f"**Passed.** {summary['num_syncs']} syncs, {summary['num_checks']} checks."
        if summary["passed"]
        else f"**Failed at sync {summary['found_at_sync']}, seen by {summary['probe']}: "
        f"{summary['cause']}.** {summary['diagnosis']}"
    )
    lines = [f"{verdict} Sync: {summary['sync']}, {summary['mode']}."]
    if summary["drift_first"] is not None:
        lines.append(
            f"Drift after the first sync {summary['drift_first']:.1e}, after the last "
            f"{summary['drift_last']:.1e} nats per token."
        )
    if summary["read_back"] is not None:
        lines.append(f"Read back out of the engine: {summary['read_back']}.")
    lines += [
        "",
        "| probe | check | of | worst | limit | | where |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in worst_rows(rows)]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    told = row["limit"] > 0 or row["value"] > 0
    value, limit = (f"{row['value']:.1e}", f"{row['limit']:.0e}") if told else ("", "")
    of = f"{row['group']} ({row['count']})" if row["count"] > 1 else row["group"]
    probe = f"{row['probe']} {PROBES[row['probe']]}"
    state = "ok" if row["ok"] else "**wrong**"
    return f"| {probe} | {row['check']} | {of} | {value} | {limit} | {state} | {row['worst']} |"
