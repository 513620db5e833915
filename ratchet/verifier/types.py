"""What the verifier says: styles, statuses, the verdict, and the version of the rules.

`VERIFIER_VERSION` is part of every score table's key: raise it whenever a verdict can change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ratchet.errors import UserError

VERIFIER_VERSION = "3"
DEFAULT_DEADLINE_SECONDS = 5.0  # for one symbolic check, from its dispatch to a worker


class Style(StrEnum):
    """Where a prompt format puts the answer."""

    TAGS = "tags"  # <SOLUTION>…</SOLUTION>, numeric
    HASH = "hash"  # #### …, numeric
    BOXED = "boxed"  # \boxed{…}, any mathematics
    PLAIN = "plain"  # anywhere, numeric


class Status(StrEnum):
    """How far the verifier got. Only `OK` carries a judgement of the answer."""

    OK = "ok"
    PARSE_FAILURE = "parse_failure"
    GOLD_UNPARSEABLE = "gold_unparseable"
    TIMEOUT = "timeout"
    TOO_COMPLEX = "too_complex"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one completion.

    `strict` is right answer and exact format, `lenient` right answer wherever the format lets it
    be found; `strict` implies `lenient`, and both are False unless `status` is `ok`. `extracted`
    is the answer as read (None where none was), `reason` one line for people.
    """

    status: Status
    extracted: str | None
    strict: bool
    lenient: bool
    reason: str


# Prompt formats by name, where their style is called otherwise.
FORMATS = {
    "gsm8k_hash": Style.HASH,
    "gsm8k_tags": Style.TAGS,
    "tags_example": Style.TAGS,
}


def as_style(style: Style | str) -> Style:
    """The style that `style` (its name or a prompt format's) means. UserError for another name."""
    if style.__class__ is Style:
        return style
    try:
        return FORMATS.get(style) or Style(style)
    except ValueError:
        names = ", ".join(Style)
        raise UserError(f"unknown answer style {style!r}: use one of {names}") from None


def status_rates(statuses: Iterable[Status | str]) -> dict[str, float]:
    """Share of each status, every status named (all zero for no verdicts)."""
    counts = Counter(Status(status) for status in statuses)
    total = max(1, counts.total())
    return {status.value: counts[status] / total for status in Status}
