"""The comparison in words.

The strict score decides, because it is what a user of the model gets: better, worse, or inside the
noise. A difference counts when its paired interval excludes zero and the exact McNemar test agrees
at the same level; the bootstrap alone is too sure of itself when few questions flip. Once the
strict score has moved, the lenient score tells how much of the move is maths and how much format.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

Row = dict[str, Any]


class Outcome(StrEnum):
    """What a comparison shows."""

    BETTER = "better"
    BETTER_FORMAT = "better at the format, not at the maths"
    WORSE = "worse"
    WORSE_FORMAT = "worse at the format, not at the maths"
    NOISE = "inside the noise"


@dataclass(frozen=True)
class Verdict:
    """One benchmark's verdict on the last arm against the first."""

    benchmark: str
    outcome: Outcome
    sentence: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"outcome": self.outcome.value, "notes": list(self.notes)}


def direction(row: Row, confidence: float) -> int:
    """1 or −1 for a real gain or loss, 0 inside the noise."""
    if row["p_value"] >= 1 - confidence:
        return 0
    if row["ci_low"] > 0:
        return 1
    return -1 if row["ci_high"] < 0 else 0


def points(value: float) -> str:
    """A difference of shares in percentage points, signed (with a true minus)."""
    return f"{round(100 * value, 1) + 0.0:+.1f}".replace("-", "−")


def interval(row: Row, confidence: float) -> str:
    """'95% interval +1.2 to +3.4'."""
    return f"{confidence:.0%} interval {points(row['ci_low'])} to {points(row['ci_high'])}"


def outcome_of(strict: Row, lenient: Row, confidence: float) -> Outcome:
    """The outcome of one pair of arms on one benchmark."""
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


def _warmstart_note(row: Row, confidence: float) -> str:
    size = f"{points(row['difference'])} points ({interval(row, confidence)})"
    moved = direction(row, confidence)
    if moved > 0:
        return f"RL beats the warm start by {size}"
    if moved < 0:
        return f"RL falls behind the warm start by {size}"
    return f"RL is not told apart from the warm start: {size}"


def judge(
    strict: Row,
    lenient: Row,
    gap: Row,
    over_warmstart: Row | None,
    smallest: float,
    confidence: float,
    about: str = "",
) -> Verdict:
    """Verdict from the 'comparison' rows of one benchmark, whole, greedy.

    `strict` and `lenient` compare the first arm with the last, `gap` is their format gain,
    `over_warmstart` compares the warm start with RL (strict), `smallest` is the smallest
    difference the strict test could have seen; `about` says what is special about the questions.
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
    if over_warmstart is not None:
        notes.append(_warmstart_note(over_warmstart, confidence))
    notes.append(
        f"the smallest true difference this test finds 4 times in 5 is {100 * smallest:.1f} points"
    )
    return Verdict(strict["benchmark"], outcome, sentence, tuple(notes))


def one_line(verdicts: list[Verdict]) -> str:
    """All benchmarks in one line: the first in full, the others by their sentence."""
    first, *others = verdicts
    head = "; ".join((first.sentence, *first.notes))
    return " | ".join((head, *(verdict.sentence for verdict in others)))
