"""Equality of single values where exact arithmetic decides it.

`LocalScalars` raises `UndecidedError` where only the engine can tell; the engine's scalars, in a
worker, are a subclass that always answers.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from ratchet.verifier.answers.latex import squashed
from ratchet.verifier.answers.numbers import Value
from ratchet.verifier.answers.shapes import group_braces, rational
from ratchet.verifier.answers.units import split_unit, units_conflict

MIN_SIGNIFICANT_DIGITS = 6
BASE = re.compile(r"(-?)(?:\\text\{ *|\()?([0-9A-Z]+) *[})]?_\{? *([0-9]+) *\}?")
LETTER = re.compile(r"\\text\{([A-Za-z])\}")  # 5\\text{m} may be written 5m
INFINITE = {"\\infty": 1, "+\\infty": 1, "-\\infty": -1}


class UndecidedError(Exception):
    """Only the symbolic engine can tell."""


class LocalScalars:
    """Decides what rationals, infinities and literal equality can decide."""

    def equal(self, gold: str, answer: str) -> bool:
        """Whether two scalars are equal. Raises `UndecidedError`."""
        if LETTER.sub(r"\1", squashed(gold)) == LETTER.sub(r"\1", squashed(answer)):
            return True
        gold, gold_unit = split_unit(gold)
        answer, unit = split_unit(answer)
        if units_conflict(gold_unit, unit):
            return False
        gold, answer = group_braces(gold), group_braces(answer)
        if squashed(gold) == squashed(answer):
            return True
        if gold in INFINITE or answer in INFINITE:
            return INFINITE.get(gold, 0) == INFINITE.get(answer, 2)
        bases = BASE.fullmatch(gold), BASE.fullmatch(answer)
        if any(bases):
            return same_base(*bases)
        one, other = rational(gold), rational(answer)
        if one is not None and other is not None:
            return values_agree(one, other, gold, answer)
        return self.symbolic(gold, answer)

    def symbolic(self, gold: str, answer: str) -> bool:
        raise UndecidedError

    def proportion(self, gold: tuple[str, str], answer: tuple[str, str]) -> int:
        """The sign of the constant c with gold left - right = c (answer left - right), 0 if
        there is none."""
        raise UndecidedError

    def same_matrix(self, gold: str, answer: str) -> bool:
        """Whether two matrices, at least one written as a sum or product, are equal."""
        raise UndecidedError

    def same_set(self, gold: str, answer: str) -> bool:
        """Whether two sets of numbers, written as unions, differences or ranges, are equal."""
        raise UndecidedError


def same_base(gold: re.Match[str] | None, answer: re.Match[str] | None) -> bool:
    """Whether two numerals with a base subscript are the same numeral."""
    if gold is None or answer is None:
        return False
    same_digits = gold[2].lstrip("0") == answer[2].lstrip("0")
    return gold[1] == answer[1] and int(gold[3]) == int(answer[3]) and same_digits


def values_agree(gold: Value, answer: Value, gold_text: str, answer_text: str) -> bool:
    """Exact equality; or one side is a decimal that rounds a non-terminating other side, to at
    least six significant digits."""
    if gold == answer:
        return True
    sides: list[tuple[Value, Value, str]] = [
        (answer, gold, answer_text),
        (gold, answer, gold_text),
    ]
    for decimal, exact, text in sides:
        if not terminates(exact) and terminates(decimal):
            unit = last_place(text)
            if unit is not None and is_rounding(decimal, exact, unit):
                return True
    return False


def is_rounding(decimal: Any, exact: Any, unit: Any) -> bool:
    """Whether `decimal`, whose last place is worth `unit`, is `exact` rounded or cut off there."""
    short = abs(exact) - abs(decimal)
    return (decimal < 0) == (exact < 0) and bool(-unit / 2 <= short < unit)


def terminates(value: Value) -> bool:
    """Whether a rational has a finite decimal expansion."""
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


def last_place(text: str) -> Value | None:
    """One unit in the last place of a decimal with six significant digits or more, else None."""
    match = re.fullmatch(r"[-+ ]*([0-9,]*)\.([0-9]+)", text.strip())
    if match is None:
        return None
    digits = (match[1].replace(",", "") + match[2]).lstrip("0")
    if len(digits) < MIN_SIGNIFICANT_DIGITS:
        return None
    return Fraction(1, 10 ** len(match[2]))
