"""The comparison in words.

The strict score decides, because it is what a user of the model gets: better, worse, or inside the
noise. A difference counts when its paired interval excludes zero and the exact McNemar test agrees
at the same level. Once the strict score has moved, the lenient score tells how much of the move is
maths and how much format. Beside the first variant, the last is judged against every variant
between: the warm start, controls, other models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ratchet.config.run import Control
from ratchet.evaluation.stats import difference_interval
from ratchet.words import points

Row = dict[str, Any]

VARIANTS_IN_WORDS = {"baseline": "the starting model", "warmstart": "the warm start", "rl": "RL"}
CONTROLS = tuple(control.value for control in Control)


class Outcome(StrEnum):
    """What a comparison shows."""

    BETTER = "better"
    BETTER_FORMAT = "better at the format, not at the maths"
    WORSE = "worse"
    WORSE_FORMAT = "worse at the format, not at the maths"
    NOISE = "inside the noise"


@dataclass(frozen=True)
class Verdict:
    """One benchmark's verdict on the last variant against the first."""

    benchmark: str
    outcome: Outcome
    sentence: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"outcome": self.outcome.value, "notes": list(self.notes)}


@dataclass(frozen=True)
class Price:
    """What the last variant cost beyond the one it started from."""

    since: str
    """The variant it started from."""
    device_seconds: float


def direction(row: Row, confidence: float) -> int:
    """1 or −1 for a real gain or loss, 0 inside the noise."""
    if row["p_adjusted"] >= 1 - confidence:
        return 0
    if row["ci_low"] > 0:
        return 1
    return -1 if row["ci_high"] < 0 else 0


def interval(row: Row, confidence: float) -> str:
    """'95% interval +1.2 to +3.4'."""
    return f"{confidence:.0%} interval {points(row['ci_low'])} to {points(row['ci_high'])}"


def device_time(seconds: float) -> str:
    """Seconds of a device as '12 device-seconds' or, from six minutes on, '1.4 device-hours'."""
    if seconds < 360:
        return f"{seconds:.3g} device-seconds"
    return f"{seconds / 3600:.2g} device-hours"


def in_words(variant: str) -> str:
    """A variant in a sentence."""
    return VARIANTS_IN_WORDS.get(
        variant, f"the control '{variant}'" if variant in CONTROLS else f"'{variant}'"
    )


def outcome_of(strict: Row, lenient: Row, confidence: float) -> Outcome:
    """The outcome of one pair of variants on one benchmark."""
    moved = direction(strict, confidence)
    if moved == 0:
        return Outcome.NOISE
    same_way = direction(lenient, confidence) == moved
    if moved > 0:
        return Outcome.BETTER if same_way else Outcome.BETTER_FORMAT
    return Outcome.WORSE if same_way else Outcome.WORSE_FORMAT


def _split_note(strict: Row, lenient: Row, gap: Row, confidence: float) -> str:
    return (
        f"of {points(strict['difference'])} points, {points(lenient['difference'])} are maths "
        f"(right in any format; {interval(lenient, confidence)}) and {points(gap['difference'])} "
        f"are format ({interval(gap, confidence)})"
    )


def _against_note(row: Row, confidence: float) -> str:
    """How the last variant stands to one between the first and it."""
    last, other = in_words(row["variant_b"]), in_words(row["variant_a"])
    size = f"{points(row['difference'])} points ({interval(row, confidence)})"
    moved = direction(row, confidence)
    if moved > 0:
        return f"{last} beats {other} by {size}"
    if moved < 0:
        return f"{last} falls behind {other} by {size}"
    return f"{last} is not told apart from {other}: {size}"


def price_note(row: Row, price: Price, confidence: float) -> str:
    """What the gain in `row`, over the variant the last one started from, cost in device time."""
    name, since = in_words(row["variant_b"]), in_words(price.since)
    spent = f"{name} took {device_time(price.device_seconds)} beyond {since}"
    if direction(row, confidence) <= 0:
        return f"{spent} and gained nothing that stands out from the noise"
    each = device_time(price.device_seconds / (100 * row["difference"]))
    return f"{spent} for {points(row['difference'])} points: {each} per point"


def judge(
    strict: Row,
    lenient: Row,
    gap: Row,
    against: list[Row],
    smallest: float,
    confidence: float,
    about: str = "",
    price: Price | None = None,
) -> Verdict:
    """Verdict from the 'comparison' rows of one benchmark, whole, greedy.

    `strict` and `lenient` compare the first variant with the last, `gap` is their format gain,
    `against` compares the variants between with the last one (strict), `smallest` is the smallest
    difference the strict test could have seen; `about` says what is special about the questions,
    `price` what the last variant cost beyond the first or one of those between.
    """
    outcome = outcome_of(strict, lenient, confidence)
    name = strict["benchmark"] + (f" ({about})" if about else "")
    sentence = (
        f"{outcome.value}: {name} {100 * strict['value_a']:.1f}% → "
        f"{100 * strict['value_b']:.1f}% strict, {points(strict['difference'])} points "
        f"({interval(strict, confidence)}, n={strict['num_questions']:,})"
    )
    notes = []
    if outcome is Outcome.NOISE:
        if direction(lenient, confidence):
            notes.append(
                f"the lenient score moved by {points(lenient['difference'])} points "
                f"({interval(lenient, confidence)})"
            )
    else:
        notes.append(_split_note(strict, lenient, gap, confidence))
    notes += [_against_note(row, confidence) for row in against]
    if price is not None:
        paid_for = next(row for row in [strict, *against] if row["variant_a"] == price.since)
        notes.append(price_note(paid_for, price, confidence))
    notes.append(
        f"the smallest true difference this test finds 4 times in 5 is {100 * smallest:.1f} points"
    )
    return Verdict(strict["benchmark"], outcome, sentence, tuple(notes))


def contamination(public: list[Row], fresh: list[Row], confidence: float) -> list[str]:
    """Warnings where a gain on public questions is absent from fresh ones nobody can have seen.

    `public` and `fresh` are lenient rows (the maths alone) of whole benchmarks for the same pair of
    variants. A warning needs a real gain on the public set, none on the fresh one though there was
    room for as much, and a difference of the two gains whose interval excludes zero: the questions
    differ, so the gains are independent.
    """
    warnings = []
    for seen in public:
        for new in fresh:
            no_room = 1 - new["value_a"] < seen["difference"]
            if direction(seen, confidence) <= 0 or direction(new, confidence) > 0 or no_room:
                continue
            gains = [(row["difference"], row["ci_low"], row["ci_high"]) for row in (new, seen)]
            excess, low, high = difference_interval(*gains)
            if low <= 0:
                continue
            warnings.append(
                f"{seen['benchmark']} gains {points(seen['difference'])} points of lenient "
                f"accuracy, fresh questions ({new['benchmark']}) {points(new['difference'])}: "
                f"{points(excess)} apart ({confidence:.0%} interval {points(low)} to "
                f"{points(high)}). Look for test questions in the training data before you "
                "believe the gain"
            )
    return warnings


def one_line(verdicts: list[Verdict], warnings: list[str] | None = None) -> str:
    """All benchmarks in one line: the first in full, the others by their sentence, then the
    warnings."""
    first, *others = verdicts
    head = "; ".join((first.sentence, *first.notes))
    rest = [verdict.sentence for verdict in others]
    return " | ".join((head, *rest, *(f"warning: {warning}" for warning in warnings or [])))
