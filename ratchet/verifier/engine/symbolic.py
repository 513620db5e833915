"""Equality of scalars that are no rationals. Runs only inside a worker process.

`numeric` reads most answers and compares them to many digits, constants once and expressions at
fixed pseudo-random points of both signs. What it finds unclear, math-verify parses, as
`\\boxed{text}` on both sides (its LaTeX reader only: its expression reader evaluates Python);
the results are compared the same way, and what cannot be evaluated goes to math-verify's own
comparison. No parsed object is turned into a string here: printing some of them never ends.
"""

from __future__ import annotations

import logging
import random
import re
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]
import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as engine_verify

from ratchet.verifier.answers.latex import too_complex
from ratchet.verifier.answers.scalars import LocalScalars, is_rounding, last_place
from ratchet.verifier.engine import numeric

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# All of math-verify's own rewriting is off: its unit list eats trailing letters (a + b + c), it
# drops primes, and `latex.clean` has already made one spelling.
PLAIN = NormalizationConfig(
    basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="last"
)
CONFIG = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=PLAIN)]
DIGITS = 50
AGREE = sympy.Float("1e-40")
TINY = sympy.Float("1e-60")
POINTS = 6
LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
DEGREES = re.compile(r"([0-9.]+) *\^\\circ")
DECIMAL_IN_TEXT = re.compile(r"(\^ *)?(?<![0-9.,])([0-9]*)\.([0-9]+)(?![0-9.,])")
DECIMAL = re.compile(r"[-+ ]*[0-9,]*\.[0-9]+")


def as_fraction(match: re.Match[str]) -> str:
    """A decimal as an exact fraction: the engine's own decimals carry 15 digits."""
    power, whole, places = match[1], match[2], match[3]
    fraction = f"\\frac{{{int(whole + places)}}}{{{10 ** len(places)}}}"
    return f"^{{{fraction}}}" if power else fraction


class UnreadableError(Exception):
    """The engine cannot parse a text; `text` is that text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class RefusedError(Exception):
    """A text is not given to the engine; the message says why."""


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """The sympy object of cleaned `text`. Raises `UnreadableError` or `RefusedError`."""
    trouble = too_complex(text)
    if trouble is not None:
        raise RefusedError(trouble)
    exact = DECIMAL_IN_TEXT.sub(as_fraction, DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text))
    found = parse(
        "\\boxed{" + exact + "}", CONFIG, fallback_mode="no_fallback", parsing_timeout=None
    )
    if not found:
        raise UnreadableError(text)
    return found[0]


def scalar(text: str) -> Any:
    """`text` as one sympy expression. Raises `UnreadableError` for a set, tuple or relation."""
    value = parsed(text)
    if not isinstance(value, sympy.Expr):
        raise UnreadableError(text)
    return value


def points(symbols: list[Any]) -> list[dict[Any, Any]]:
    """Fixed pseudo-random values of both signs for `symbols`; the first point is positive."""
    rng = random.Random(20_240_229)
    chosen = []
    for number in range(POINTS):
        point = {}
        for symbol in symbols:
            sign = 1 if number % 3 == 0 or rng.random() < 0.4 else -1
            point[symbol] = sympy.Rational(sign * rng.randint(300, 4000), rng.randint(900, 1100))
        chosen.append(point)
    return chosen


def number(expression: Any, point: dict[Any, Any]) -> Any | None:
    """`expression` at `point` as a complex number of `DIGITS` digits, or None if undefined."""
    value = sympy.N(expression.subs(point).doit(), DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    return value


def same_number(one: Any, other: Any) -> bool | None:
    """Whether two high-precision numbers are equal; None when both are too near zero to tell."""
    size = max(abs(one), abs(other))
    if size < TINY:
        return True if one == other else None
    return bool(abs(one - other) <= AGREE * size)


def case_differs(gold: str, answer: str) -> bool:
    """Whether a letter stands in one text only in the other case (r for R, Π for π)."""
    ones, others = set(LETTERS.findall(gold)), set(LETTERS.findall(answer))
    return bool({m.lower() for m in ones - others} & {m.lower() for m in others - ones})


class EngineScalars(LocalScalars):
    """`LocalScalars` that can answer every question."""

    def symbolic(self, gold: str, answer: str) -> bool:
        decimal = DECIMAL.fullmatch(gold), DECIMAL.fullmatch(answer)
        if (decimal[0] is None) != (decimal[1] is None):
            return rounds(*((gold, answer) if decimal[0] else (answer, gold)))
        try:
            return numeric.numerically_equal(gold, answer)
        except numeric.UnclearError:
            one, other = scalar(gold), scalar(answer)
        return not case_differs(gold, answer) and self.same_value(one, other)

    def same_value(self, one: Any, other: Any) -> bool:
        """Whether two expressions have the same value at every point tried."""
        symbols = sorted(one.free_symbols | other.free_symbols, key=lambda s: s.name)
        judged = 0
        for point in points(symbols) if symbols else [{}]:
            left, right = number(one, point), number(other, point)
            if left is None and right is None:
                continue
            if left is None or right is None:
                return False
            same = same_number(left, right)
            if same is False:
                return False
            judged += same is True
        if judged >= (3 if symbols else 1):
            return True
        return bool(engine_verify([one], [other], timeout_seconds=None))

    def proportion(self, gold: tuple[str, str], answer: tuple[str, str]) -> int:
        try:
            return numeric.proportion(gold, answer)
        except numeric.UnclearError:
            return self.engine_proportion(gold, answer)

    def engine_proportion(self, gold: tuple[str, str], answer: tuple[str, str]) -> int:
        one = scalar(gold[0]) - scalar(gold[1])
        other = scalar(answer[0]) - scalar(answer[1])
        if case_differs("".join(gold), "".join(answer)) or one.free_symbols != other.free_symbols:
            return 0
        symbols = sorted(one.free_symbols, key=lambda s: s.name)
        ratio = None
        judged = 0
        for point in points(symbols):
            left, right = number(one, point), number(other, point)
            if left is None and right is None:
                continue
            if left is None or right is None or abs(left) < TINY or abs(right) < TINY:
                return 0
            if ratio is None:
                ratio = left / right
            elif same_number(left, ratio * right) is not True:
                return 0
            judged += 1
        if ratio is None or judged < 3 or not ratio.is_real:
            return 0
        return 1 if ratio > 0 else -1

    def same_set(self, gold: str, answer: str) -> bool:
        one, other = parsed(gold), parsed(answer)
        if not (isinstance(one, sympy.Set) and isinstance(other, sympy.Set)):
            return False
        if isinstance(one, FiniteSet) != isinstance(other, FiniteSet):
            return False
        return bool(engine_verify([one], [other], timeout_seconds=None))

    def same_matrix(self, gold: str, answer: str) -> bool:
        one, other = parsed(gold).doit(), parsed(answer).doit()
        if not (isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase)):
            return False
        return one.shape == other.shape and all(
            self.same_value(left, right)
            for left, right in zip(one.flat(), other.flat(), strict=True)
        )


def rounds(decimal: str, exact: str) -> bool:
    """Whether a decimal is `exact`, or rounds it to six significant digits or more."""
    try:
        value = numeric.constant(exact)
    except numeric.UnclearError:
        expression = scalar(exact)
        found = None if expression.free_symbols else number(expression, {})
        if found is None:
            return False
        value = mpmath.mpmathify(found)
    with mpmath.workdps(numeric.CONSTANT_DIGITS):
        written = numeric.constant(decimal)
        unit = last_place(decimal)
        if mpmath.im(value):
            return False
        value = mpmath.re(value)
        if unit is None:
            return numeric.close(value, written, numeric.CONSTANT_DIGITS)
        return is_rounding(mpmath.re(written), value, mpmath.mpf(unit.numerator) / unit.denominator)
