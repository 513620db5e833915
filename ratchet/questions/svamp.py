"""SVAMP: 1,000 short word problems of one or two operations.

Reads the original file (one list) and the hub's copy (train and test, answers as text). Of the
original file, split 'train' is the first 700 rows and 'test' the other 300; that is our cut, the
hub's has the same sizes, maybe of other rows. Without a split all rows are read. The
question is body and question joined by us in both, so that one problem has one text. The equation
becomes a reference solution annotated as GSM8K annotates its own; it is left out where it does
not give the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

from ratchet.questions.base import Parsed, Reader, Row, gold_text, plain_number, question_text

_TOKEN = re.compile(r"\d+(?:\.\d+)?|[-+*/()]")


def parse(row: Row) -> Parsed:
    """A row {Body, Question, Answer, Equation}."""
    gold = plain_number(gold_text(row, "Answer"))
    equation = row.get("Equation")
    steps = equation_steps(equation) if isinstance(equation, str) else None
    solution = None
    if steps and steps[-1][1] == gold:
        lines = [f"{step} = <<{step.replace(' ', '')}={value}>>{value}" for step, value in steps]
        solution = "\n".join([*lines, f"#### {gold}"])
    return Parsed(
        question=join(question_text(row, "Body"), question_text(row, "Question")),
        gold=gold,
        reference_solution=solution,
        difficulty=float(len(steps)) if solution and steps else None,
    )


def join(body: str, question: str) -> str:
    """Body and question as running text. Many bodies end without a full stop, in a half
    sentence that the question completes: those get a comma."""
    if body[-1] in ".?!":
        return f"{body} {question}"
    return f"{body.rstrip(',')}, {question[0].lower()}{question[1:]}"


def equation_steps(equation: str) -> list[tuple[str, str]] | None:
    """'( ( 3.0 + 5.0 ) * 2.0 )' → [('3 + 5', '8'), ('8 * 2', '16')].

    None when it can't be read or a value has no exact decimal form.
    """
    steps: list[tuple[str, str]] = []
    tokens = iter(_TOKEN.findall(equation))
    try:
        _evaluate(tokens, steps)
    except (StopIteration, ValueError, ZeroDivisionError):
        return None
    return steps if next(tokens, None) is None else None


def _evaluate(tokens: Iterator[str], steps: list[tuple[str, str]]) -> Fraction:
    """Value of the next operand (a number, or '( operand sign operand )'); appends its steps."""
    token = next(tokens)
    if token != "(":
        return Fraction(token)
    left = _evaluate(tokens, steps)
    sign = next(tokens)
    right = _evaluate(tokens, steps)
    if next(tokens) != ")":
        raise ValueError("unbalanced")
    values = {"+": left + right, "-": left - right, "*": left * right}
    value = left / right if sign == "/" else values.get(sign)
    if value is None:
        raise ValueError(sign)
    steps.append((f"{_decimal(left)} {sign} {_decimal(right)}", _decimal(value)))
    return value


def _decimal(value: Fraction) -> str:
    """The exact decimal form; ValueError where it has none of at most six places."""
    for places in range(7):
        scaled = value * 10**places
        if scaled.denominator == 1:
            return f"{Decimal(scaled.numerator).scaleb(-places):f}"
    raise ValueError(f"{value} has no short decimal form")


READER = Reader(
    parse=parse,
    needs=(("Body",), ("Question",), ("Answer",)),
    optional=("Equation",),
    hub_id="ChilleD/SVAMP",
    file_splits={"train": slice(0, 700), "test": slice(700, None)},
)
