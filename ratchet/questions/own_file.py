"""A user's own questions: any table with a question and a gold column, under any names.

`SourceConfig.columns` maps our names to the table's. A column that is mapped must exist; the
optional ones are also read under their own names where they exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ratchet.errors import UserError
from ratchet.questions.base import (
    BadRowError,
    Parsed,
    Reader,
    Row,
    gold_text,
    optional_text,
    question_text,
    rounded_band,
)

OURS = ("question", "gold", "reference_solution", "difficulty")


def reader(columns: Mapping[str, str]) -> Reader:
    """The reader for a table whose columns are named as `columns` says.

    UserError for a name on our side that does not exist.
    """
    for name in columns:
        if name not in OURS:
            raise UserError(f"columns can map {', '.join(OURS)}; '{name}' is none of them")
    names = {ours: columns.get(ours, ours) for ours in OURS}

    def parse(row: Row) -> Parsed:
        difficulty = _number(row, names["difficulty"])
        return Parsed(
            question=question_text(row, names["question"]),
            gold=_gold(row, names["gold"]),
            reference_solution=optional_text(row, names["reference_solution"]),
            difficulty=difficulty,
            band=rounded_band(difficulty),
        )

    mapped = [name for name in OURS if name in ("question", "gold") or name in columns]
    return Reader(
        parse=parse,
        needs=tuple((names[name],) for name in mapped),
        optional=tuple(names[name] for name in OURS if name not in mapped),
    )


def _gold(row: Row, column: str) -> str:
    """The answer; '' where it is missing or empty, so that the gold check drops and lists that
    row instead of refusing the whole table for it."""
    value = row.get(column)
    empty = value is None or (isinstance(value, str) and not value.strip())
    return "" if empty else gold_text(row, column)


def _number(row: Row, column: str) -> float | None:
    """A number in `row[column]`, as such or as text; None where it is missing or empty."""
    value = row.get(column)
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRowError(f"'{column}' is {value!r}, not a number")
    return number
