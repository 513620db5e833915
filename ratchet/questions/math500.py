"""MATH-500: 500 competition problems in five levels, golds in LaTeX."""

from __future__ import annotations

from ratchet.questions.base import (
    BadRowError,
    Parsed,
    Reader,
    Row,
    gold_text,
    optional_text,
    question_text,
)


def parse(row: Row) -> Parsed:
    """A row {problem, answer, level, solution}; the level as 3 or 'Level 3'."""
    level = str(row.get("level")).removeprefix("Level").strip()
    if not level.isdecimal():
        raise BadRowError(f"'level' is {row.get('level')!r}, not a number from 1 to 5")
    return Parsed(
        question=question_text(row, "problem"),
        gold=gold_text(row, "answer"),
        reference_solution=optional_text(row, "solution"),
        difficulty=float(level),
        band=f"level {int(level)}",
    )


READER = Reader(
    parse=parse,
    needs=(("problem",), ("answer",), ("level",)),
    optional=("solution",),
    hub_id="HuggingFaceH4/MATH-500",
)
