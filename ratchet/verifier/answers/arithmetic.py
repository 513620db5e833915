"""Exact value of cleaned LaTeX that is plain arithmetic on rationals.

Covers + - * / \\cdot \\times \\div ^ ! parentheses, \\frac, \\binom, mixed numbers, square roots of
squares, repeating decimals and scientific notation. Anything else is None, which means "not
rational arithmetic", never "wrong". Sizes are capped, so no input is slow.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from ratchet.verifier.answers.latex import MAX_NESTING, nesting
from ratchet.verifier.answers.numbers import Value, simplest
from ratchet.verifier.answers.reader import Node, UnclearError, literal, read

MAX_BITS = 40_000
MAX_POWER = 10_000


class UndefinedError(Exception):
    """The text divides by zero."""


def repeating(text: str) -> Value:
    """0.1\\overline{6} as a fraction."""
    head, _, cycle = text.partition("\\overline{")
    cycle = cycle.rstrip("}")
    whole, _, fixed = head.partition(".")
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed or "0"), scale)
    return simplest(value + Fraction(int(cycle), scale * (10 ** len(cycle) - 1)))


def bits(value: Value) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def sized(value: Value) -> Value:
    """`value` if it is within the size cap."""
    if bits(value) > MAX_BITS:
        raise UnclearError
    return simplest(Fraction(value))


def divided(top: Value, bottom: Value) -> Value:
    if not bottom:
        raise UndefinedError
    return sized(Fraction(top) / Fraction(bottom))


def mixed(whole: Value, top: Value, bottom: Value) -> Value:
    """2\\frac{1}{3}, whose fraction must be a proper one."""
    if not (isinstance(top, int) and isinstance(bottom, int) and 0 < top < bottom):
        raise UnclearError
    return simplest(whole + Fraction(top, bottom))


def raised(base: Value, exponent: Value) -> Value:
    """base^exponent for an integer exponent within the caps."""
    if not isinstance(exponent, int) or abs(exponent) > MAX_POWER:
        raise UnclearError
    if base == 0 and exponent <= 0:
        raise UndefinedError
    if bits(base) * abs(exponent) > MAX_BITS:
        raise UnclearError
    return simplest(Fraction(base) ** exponent)


def factorial(value: Value) -> Value:
    if not isinstance(value, int) or not 0 <= value <= 500:
        raise UnclearError
    return sized(math.factorial(value))


def binomial(top: Value, bottom: Value) -> Value:
    if not (isinstance(top, int) and isinstance(bottom, int) and 0 <= bottom <= top <= 1000):
        raise UnclearError
    return math.comb(top, bottom)


def square_root(value: Value, index: Value) -> Value:
    """The root of a square of a rational."""
    assert index == 2, "plain arithmetic has no other roots"
    if value < 0:
        raise UnclearError
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top != value.numerator or bottom * bottom != value.denominator:
        raise UnclearError
    return simplest(Fraction(top, bottom))


RULES: dict[str, Callable[..., Value]] = {
    "num": literal,
    "repeating": repeating,
    "mixed": mixed,
    "neg": operator.neg,
    "add": lambda one, other: sized(one + other),
    "mul": lambda one, other: sized(one * other),
    "div": divided,
    "pow": raised,
    "factorial": factorial,
    "binom": binomial,
    "root": square_root,
}


def exact(tree: Node) -> Value:
    """The value of a tree of plain arithmetic. Raises `UnclearError` or `UndefinedError`."""
    pending = []
    while tree[0] not in ("num", "repeating"):  # down the left: a sum may have 1,000 terms
        pending.append(tree)
        tree = tree[1]
    value = RULES[tree[0]](tree[1])
    for kind, _, *others in reversed(pending):
        value = RULES[kind](value, *map(exact, others))
    return value


def rational_value(text: str) -> Value | None:
    """The exact value of cleaned `text`, or None if it is no rational arithmetic.

    Raises `UndefinedError` when it divides by zero."""
    if not text or nesting(text) > MAX_NESTING or re.search(r"[^0-9eE.,!^*/+\-(){} \\a-z]", text):
        return None
    try:
        return exact(read(text, plain=True))
    except UnclearError:
        return None
