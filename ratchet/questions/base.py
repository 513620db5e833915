"""What a question is, and what a reader of one kind of source provides.

Each kind of source has a module with a `READER`: which columns its rows have and how one row
becomes a question. Where the rows come from (a file, a folder, the hub) is the same for all
kinds and lives in `files` and `hub`; `load` puts the two together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One problem with its gold answer."""

    question_id: str
    """See `question_id`."""
    source: str
    """Label of the source (`SourceConfig.label`)."""
    split: str
    """Split of the data set; a single file's is its name without the ending."""
    question: str
    gold: str
    reference_solution: str | None
    difficulty: float | None
    """In the source's own unit: steps, a level, a rating."""
    band: str
    """Difficulty band that results are broken down by; 'all' where the source has none."""


@dataclass(frozen=True)
class Parsed:
    """What a reader takes from one row."""

    question: str
    gold: str
    reference_solution: str | None = None
    difficulty: float | None = None
    band: str = "all"


class BadRowError(ValueError):
    """A row that can't be read; `load` adds where it stands."""


@dataclass(frozen=True)
class Reader:
    """How rows of one kind of source are read."""

    parse: Callable[[Row], Parsed]
    """Row to question; BadRowError when a value is missing or unusable."""
    needs: tuple[tuple[str, ...], ...]
    """Needed columns; of each tuple one must be there."""
    optional: tuple[str, ...] = ()
    """Further columns that are read where they exist."""
    hub_id: str | None = None
    """Data set on the hub, where the source has a usual one."""
    hub_config: str | None = None
    """Its configuration on the hub."""
    file_splits: Mapping[str, slice] = field(default_factory=dict)
    """Rows of each split, for a source whose original is one file."""


def question_id(source: str, split: str, question: str) -> str:
    """16 hexadecimal digits of the sha256 over source label, split and text."""
    parts = json.dumps([source, split, question], ensure_ascii=False)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def question_text(row: Row, column: str) -> str:
    """The question in `row[column]`: text, or a chat of one user message."""
    value = row.get(column)
    if isinstance(value, list):
        users = [m.get("content") for m in value if isinstance(m, dict) and m.get("role") == "user"]
        if len(users) != 1 or len(value) != 1:
            raise BadRowError(f"'{column}' is a chat of more than one user message")
        value = users[0]
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"'{column}' holds no question text but {value!r}")
    return value.strip()


def gold_text(row: Row, column: str) -> str:
    """The answer in `row[column]` as text; whole numbers lose a trailing '.0'."""
    value = row.get(column)
    if isinstance(value, float) and math.isfinite(value):
        return plain_number(str(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"'{column}' holds no answer but {value!r}")
    return value.strip()


def plain_number(text: str) -> str:
    """A number without exponent or trailing zeros: '145.0' → '145', '1e3' → '1000'."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        raise BadRowError(f"{text!r} is not a number") from None
    if not number.is_finite() or abs(number.adjusted()) > 30:
        raise BadRowError(f"{text!r} is not a usable number")
    whole = f"{number:f}"
    return whole.rstrip("0").rstrip(".") if "." in whole else whole


def optional_text(row: Row, column: str) -> str | None:
    """Text in `row[column]`, None where it is missing or empty."""
    value = row.get(column)
    return value.strip() or None if isinstance(value, str) else None


def rounded_band(difficulty: float | None) -> str:
    """'difficulty 5' for 4.5 to 5.4 (halves go up), 'all' without a difficulty."""
    return "all" if difficulty is None else f"difficulty {math.floor(difficulty + 0.5)}"
