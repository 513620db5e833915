"""Difficulty bands from the pass rate that a model was measured to have.

The questions of a comparison are put into bands by what the starting model got right, in samples
that are used for nothing else (`evaluate.band_samples`). With the samples that are compared it
would go wrong: among questions that a model happened to miss, the same model does better when it is
asked again, so the lowest band would gain and the highest lose though nothing was learnt
(regression to the mean). Given the question, fresh samples know nothing of that luck.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from ratchet.errors import UserError

if TYPE_CHECKING:
    from ratchet.store.store import Artifact

BANDING = "banding"
"""What the table 'eval' calls the decoding of these samples."""
EDGES = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def pass_rate_band(num_right: int, num_samples: int) -> str:
    """'pass rate 0', 'pass rate 0 to 0.25' (without 0, with 0.25), …, 'pass rate 0.75 to 1'
    (without 1), 'pass rate 1'."""
    rate = Fraction(num_right, num_samples)
    if rate in (0, 1):
        return f"pass rate {rate}"
    low = max((edge for edge in EDGES if edge < rate), default=Fraction(0))
    high = min((edge for edge in EDGES if edge >= rate), default=Fraction(1))
    return f"pass rate {float(low):g} to {float(high):g}"


def band_order(band: str) -> list[str | float]:
    """To sort bands by: numbers in their names count as numbers, so that 10 comes after 9."""
    parts = re.split(r"(\d+(?:\.\d+)?)", band)
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


def measured_bands(
    evaluations: Mapping[str, Artifact], question_ids: Iterable[str]
) -> list[str] | None:
    """The band of each question by the samples that the first evaluation has for it (the starting
    model's in a run), by lenient verdicts; None where it has none. Bands of what a later variant
    can do would be full of questions that it does better or worse on than the first.

    UserError for a question without samples.
    """
    import pyarrow.compute as pc

    name, evaluation = next(iter(evaluations.items()))
    table = evaluation.table("eval", ["question_id", "decoding", "lenient"])
    table = table.filter(pc.equal(table.column("decoding"), BANDING))
    if not table.num_rows:
        return None
    ids = table.column("question_id").to_pylist()
    asked = Counter(ids)
    right: Counter[str] = Counter()
    for question_id, lenient in zip(ids, table.column("lenient").to_pylist(), strict=True):
        right[question_id] += lenient
    wanted = list(question_ids)
    missing = sum(question_id not in asked for question_id in wanted)
    if missing:
        raise UserError(
            f"variant '{name}' has no samples to make bands of for {missing:,} of {len(wanted):,} "
            "questions: evaluate it again"
        )
    return [pass_rate_band(right[one], asked[one]) for one in wanted]
