"""What the final comparison will be able to see, stated before anything is trained.

A paired test sees the more, the fewer answers change either way; how many will isn't known before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ratchet.config.run import RunConfig, SourceConfig, SourceKind
from ratchet.evaluation.stats import smallest_detectable_difference

if TYPE_CHECKING:
    from ratchet.store.store import Artifact

CHANGED = (0.1, 0.3)
"""Shares of answers that may change: few after a little training, many after much."""
WHOLE_SPLITS = {
    (SourceKind.GSM8K, "train"): 7473,
    (SourceKind.GSM8K, "test"): 1319,
    (SourceKind.MATH500, "test"): 500,
    (SourceKind.SVAMP, "train"): 700,
    (SourceKind.SVAMP, "test"): 300,
}


def _expected_count(source: SourceConfig, split: str) -> int | None:
    """Questions of a source, whose split is `split` by default, as far as the configuration tells;
    None where it doesn't."""
    whole = source.count if source.kind is SourceKind.SYMBOLIC else None
    if whole is None:
        whole = WHOLE_SPLITS.get((source.kind, source.split or split))
    left = None if whole is None else max(0, whole - source.offset)
    return min((n for n in (left, source.limit) if n is not None), default=None)


def expected_counts(config: RunConfig) -> dict[str, int]:
    """Test questions by benchmark as far as the configuration tells, before any are dropped."""
    counts = {one.label: _expected_count(one, "test") for one in config.questions.test}
    return {name: count for name, count in counts.items() if count is not None}


def num_train(config: RunConfig, questions: Artifact | None) -> int | None:
    """Training questions in an artifact that holds the run's questions, before there is one those
    that the configuration asks for; None where it doesn't tell."""
    if questions is not None:
        roles = questions.table("questions", ["role"]).column("role").to_pylist()
        return roles.count("train")
    counts = [_expected_count(source, "train") for source in config.questions.train]
    return None if None in counts else sum(count for count in counts if count is not None)


def counts_in(questions: Artifact) -> dict[str, int]:
    """Test questions by benchmark in a 'questions' artifact."""
    import pyarrow.compute as pc

    table = questions.table("questions", ["source", "role"])
    sources = table.filter(pc.equal(table.column("role"), "test")).column("source")
    return {item["values"]: item["counts"] for item in pc.value_counts(sources).to_pylist()}


def detectable_differences(counts: Mapping[str, int], confidence: float) -> list[str]:
    """A sentence per benchmark on the smallest true difference that its comparison finds in 4 of
    5 runs."""
    lines = []
    for name, n in counts.items():
        if not n:
            continue
        few, many = (smallest_detectable_difference(n, share, confidence) for share in CHANGED)
        lines.append(
            f"{name}, {n:,} questions: {100 * few:.1f} points if {CHANGED[0]:.0%} of the answers "
            f"change, {100 * many:.1f} if {CHANGED[1]:.0%} do"
        )
    return lines
