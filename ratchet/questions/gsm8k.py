"""GSM8K: grade-school word problems, 7,473 for training and 1,319 for testing.

The gold is the number after '####'. Bands count the annotated steps (`<<48/2=24>>`): the many
bands of rare length are one, and the about 1% of solutions without annotations are apart.
"""

from __future__ import annotations

import re

from ratchet.questions.base import BadRowError, Parsed, Reader, Row, gold_text, question_text

LONGEST = 8
"""Solutions of this many annotated steps or more share one band."""

_STEP = re.compile(r"<<[^<>]*>>")


def parse(row: Row) -> Parsed:
    """A row {question, answer}, the answer ending in '#### <number>'."""
    solution = gold_text(row, "answer")
    _, mark, gold = solution.rpartition("####")
    gold = gold.strip().replace(",", "")
    if not mark or not gold:
        raise BadRowError("'answer' has no '#### <number>' at its end")
    steps = len(_STEP.findall(solution))
    return Parsed(
        question=question_text(row, "question"),
        gold=gold,
        reference_solution=solution,
        difficulty=float(steps) if steps else None,
        band=step_band(steps),
    )


def step_band(steps: int) -> str:
    """'1 step', '2 steps', … '8+ steps'; 'unannotated' for none."""
    if steps == 0:
        return "unannotated"
    if steps >= LONGEST:
        return f"{LONGEST}+ steps"
    return "1 step" if steps == 1 else f"{steps} steps"


READER = Reader(
    parse=parse,
    needs=(("question",), ("answer",)),
    hub_id="openai/gsm8k",
    hub_config="main",
)
