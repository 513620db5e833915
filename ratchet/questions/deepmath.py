"""DeepMath-103K: hard problems with short final answers and a difficulty rating.

Two layouts are in use: {question, final_answer, difficulty} as published first, and the hub's
conversational copy {prompt, solution}, whose 'solution' is the final answer alone and which may
lack the difficulty. Neither has a reference solution of ours to train on.
"""

from __future__ import annotations

from ratchet.questions.base import (
    BadRowError,
    Parsed,
    Reader,
    Row,
    gold_text,
    question_text,
    rounded_band,
)


def parse(row: Row) -> Parsed:
    """A row in either layout."""
    difficulty = row.get("difficulty")
    if difficulty is not None and not isinstance(difficulty, int | float):
        raise BadRowError(f"'difficulty' is {difficulty!r}, not a number")
    rating = None if difficulty is None else float(difficulty)
    return Parsed(
        question=question_text(row, "question" if "question" in row else "prompt"),
        gold=_bare(gold_text(row, "final_answer" if "final_answer" in row else "solution")),
        difficulty=rating,
        band=rounded_band(rating),
    )


def _bare(gold: str) -> str:
    """The answer without a pair of dollar signs around the whole of it."""
    inner = gold[1:-1].strip()
    return inner if gold[:1] == gold[-1:] == "$" and inner and "$" not in inner else gold


READER = Reader(
    parse=parse,
    needs=(("question", "prompt"), ("final_answer", "solution")),
    optional=("difficulty",),
    hub_id="trl-lib/DeepMath-103K",
)
