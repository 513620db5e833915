"""Equality of scalars that are no rationals. Runs only inside a worker process.

`numeric` reads most answers and compares them to many digits, constants once and expressions at
fixed pseudo-random points of both signs. What it finds unclear, math-verify parses, as
`\\boxed{text}` on both sides (its LaTeX reader only: its expression reader evaluates Python);
the results are compared the same way, and what cannot be evaluated goes to math-verify's own
comparison. No parsed object is turned into a string here: printing some of them never ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from fractions import Fraction
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
AGREE_DIGITS = 48  # as `numeric.close` takes them: values agree to 40 digits
TINY = mpmath.mpf("1e-60")
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


def number(expression: Any, point: dict[Any, Fraction]) -> Any | None:
    """`expression` at `point` as an mpmath number of `DIGITS` digits, or None if undefined."""
    values = {name: sympy.Rational(z.numerator, z.denominator) for name, z in point.items()}
    value = sympy.N(expression.subs(values).doit(), DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    parts = value.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    with mpmath.workdps(DIGITS):
        return mpmath.mpc(*(mpmath.mpmathify(part) for part in parts))


def values_of(one: Any, other: Any) -> Iterator[tuple[Any | None, Any | None]]:
    """The values of two expressions at point after point, where at least one is defined."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=lambda symbol: symbol.name)
    for point in numeric.points(tuple(symbols)):
        row = number(one, point), number(other, point)
        if row != (None, None):
            yield row


def enough(one: Any, other: Any) -> int:
    """At how many points two expressions must have values for these to decide."""
    return 3 if one.free_symbols | other.free_symbols else 1


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
        judged = 0
        for left, right in values_of(one, other):
            if left is None or right is None:
                return False
            if left != right and max(mpmath.fabs(left), mpmath.fabs(right)) < TINY:
                continue  # too near zero to tell
            if not numeric.close(left, right, AGREE_DIGITS):
                return False
            judged += 1
        if judged >= enough(one, other):
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
        rows = []
        for row in values_of(one, other):
            if any(value is None or mpmath.fabs(value) < TINY for value in row):
                return 0
            rows.append(row)
        if len(rows) < enough(one, other):
            return 0
        with mpmath.workdps(DIGITS):
            return numeric.sign_of_ratio(rows, AGREE_DIGITS)

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
        value = None if expression.free_symbols else number(expression, {})
        if value is None:
            return False
    with mpmath.workdps(numeric.CONSTANT_DIGITS):
        written = numeric.constant(decimal)
        unit = last_place(decimal)
        if mpmath.im(value):
            return False
        value = mpmath.re(value)
        if unit is None:
            return numeric.close(value, written, numeric.CONSTANT_DIGITS)
        return is_rounding(mpmath.re(written), value, mpmath.mpf(unit.numerator) / unit.denominator)
