"""Regressions and improvements: answers that changed from one variant to another, with both
completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.evaluation.comparison import Variant

if TYPE_CHECKING:
    import numpy as np

MAX_LISTED = 40  # of each kind and pair of variants; the counts are always of all
DECODING = "greedy"


@dataclass(frozen=True)
class Kind:
    """A kind of change."""

    change: str
    """'improved' or 'regressed'."""
    what: str
    """'maths' (the lenient verdict changed) or 'format' (right before and after, only the
    strict one changed)."""


KINDS = tuple(
    Kind(change, what) for change in ("improved", "regressed") for what in ("maths", "format")
)


def changed(a: Variant, b: Variant, kind: Kind) -> np.ndarray:
    """Indices of the questions whose answer changed so from a to b, greedy."""
    import numpy as np

    before, after = a.answers[DECODING], b.answers[DECODING]
    if kind.change == "regressed":
        before, after = after, before
    strict_before, strict_after = before.strict_qs[:, 0], after.strict_qs[:, 0]
    lenient_before, lenient_after = before.lenient_qs[:, 0], after.lenient_qs[:, 0]
    if kind.what == "maths":
        return np.flatnonzero(lenient_after & ~lenient_before)
    return np.flatnonzero(strict_after & ~strict_before & lenient_before)


def count_changed(a: Variant, b: Variant) -> dict[str, Any]:
    """Numbers of improvements and regressions from a to b by kind, of all questions."""
    counts = {f"{kind.change}_{kind.what}": len(changed(a, b, kind)) for kind in KINDS}
    return {"variant_a": a.name, "variant_b": b.name} | counts


def list_changed(
    a: Variant,
    b: Variant,
    questions: list[dict[str, Any]],
    texts: dict[str, list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Up to `MAX_LISTED` improvements and regressions of each kind, spread evenly over the
    questions.

    `questions` are rows of the questions table in the variants' order, `texts` holds per variant
    the greedy completions in that order as {text, extracted, num_tokens, strict, lenient}.
    """
    import numpy as np

    rows = []
    for kind in KINDS:
        found = changed(a, b, kind)
        if len(found) > MAX_LISTED:
            found = found[np.linspace(0, len(found) - 1, MAX_LISTED).round().astype(int)]
        for index in found.tolist():
            question = questions[index]
            rows.append(
                {
                    "variant_a": a.name,
                    "variant_b": b.name,
                    "change": kind.change,
                    "what": kind.what,
                    "question_id": question["question_id"],
                    "benchmark": question["source"],
                    "band": question["band"],
                    "question": question["question"],
                    "gold": question["gold"],
                    "a": texts[a.name][index],
                    "b": texts[b.name][index],
                }
            )
    return rows
