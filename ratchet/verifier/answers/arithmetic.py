"""Exact value of cleaned LaTeX that is plain arithmetic on rationals.

Covers + - * / \\cdot \\times \\div ^ ! parentheses, \\frac, \\binom, mixed numbers, square roots of
squares, repeating decimals and scientific notation. Anything else is None, which means "not
rational arithmetic", never "wrong". Sizes are capped, so no input is slow.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from ratchet.verifier.answers.latex import MAX_NESTING, nesting
from ratchet.verifier.answers.numbers import GROUPED, MAX_CHARS, Value, simplest

MAX_BITS = 40_000
MAX_POWER = 10_000

TOKEN = re.compile(
    rf"(?P<rep>[0-9]*\.[0-9]*\\overline\{{[0-9]{{1,20}}\}})"
    rf"|(?P<num>(?:(?:{GROUPED})(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?P<exp>[eE][+-]?[0-9]{{1,4}}(?![0-9]))?"
    r"|(?P<op>\\(?:frac|binom|sqrt|cdot|times|div)(?![A-Za-z])|[-+*/^!(){}])"
    r"|(?P<space> +)"
)


class NotRationalError(Exception):
    """The text is no rational arithmetic, or too large to work out."""


class UndefinedError(Exception):
    """The text divides by zero."""


def tokens_of(text: str) -> list[tuple[str, str]]:
    """(kind, text) of every token. NotRationalError where something else stands."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise NotRationalError
        at = match.end()
        if match["rep"]:
            found.append(("rep", match["rep"]))
        elif match["num"]:
            found.append(("num", match[0]))
        elif match["op"]:
            found.append((match["op"], match["op"]))
        elif found and found[-1][0] == "num" and re.match(r"[0-9.]", text[at:]):
            found.append(("gap", " "))
    return found


class Parser:
    """Recursive descent over the tokens; every method returns an exact value."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, kind: str) -> str:
        if self.peek() != kind:
            raise NotRationalError
        self.at += 1
        return self.tokens[self.at - 1][1]

    def whole(self) -> Value:
        value = self.sum()
        if self.peek():
            raise NotRationalError
        return value

    def sum(self) -> Value:
        value = self.signed_product()
        while self.peek() in ("+", "-"):
            plus = self.take(self.peek()) == "+"
            term = self.signed_product()
            value = sized(value + term if plus else value - term)
        return value

    def signed_product(self) -> Value:
        sign = 1
        for _ in range(2):
            if self.peek() in ("+", "-"):
                sign = -sign if self.take(self.peek()) == "-" else sign
        return sign * self.product()

    def product(self) -> Value:
        value = self.power()
        while True:
            kind = self.peek()
            if kind in ("*", "\\cdot", "\\times"):
                self.at += 1
                value = sized(value * self.factor())
            elif kind in ("/", "\\div"):
                self.at += 1
                value = divided(value, self.factor())
            elif kind in ("(", "\\frac", "\\binom", "\\sqrt"):
                value = sized(value * self.power())
            else:
                return value

    def factor(self) -> Value:
        if self.peek() == "-":
            self.at += 1
            return -self.power()
        return self.power()

    def power(self) -> Value:
        base = self.atom()
        while self.peek() == "!":
            self.at += 1
            base = factorial(base)
        if self.peek() != "^":
            return base
        self.at += 1
        sign = -1 if self.peek() == "-" and self.take("-") else 1
        return raised(base, sign * self.atom())

    def group(self, opening: str, closing: str) -> Value:
        self.take(opening)
        value = self.sum()
        self.take(closing)
        return value

    def atom(self) -> Value:
        kind = self.peek()
        if kind == "num":
            return self.number()
        if kind == "rep":
            return repeating(self.take("rep"))
        if kind == "(":
            return self.group("(", ")")
        if kind == "{":
            return self.group("{", "}")
        if kind in ("\\frac", "\\binom"):
            self.at += 1
            top, bottom = self.group("{", "}"), self.group("{", "}")
            return divided(top, bottom) if kind == "\\frac" else binomial(top, bottom)
        if kind == "\\sqrt":
            self.at += 1
            return square_root(self.group("{", "}"))
        raise NotRationalError

    def number(self) -> Value:
        """A number, with what follows it if it is a mixed number."""
        value = literal(self.take("num"))
        if not isinstance(value, int):
            return value
        if self.peek() == "\\frac":
            self.at += 1
            top, bottom = self.group("{", "}"), self.group("{", "}")
            if not (isinstance(top, int) and isinstance(bottom, int) and 0 < top < bottom):
                raise NotRationalError
            return simplest(value + Fraction(top, bottom))
        if self.peek() == "gap":
            self.at += 1
            top = literal(self.take("num"))
            self.take("/")
            bottom = literal(self.take("num"))
            if not (isinstance(top, int) and isinstance(bottom, int) and bottom):
                raise NotRationalError
            return simplest(value + Fraction(top, bottom))
        return value


def literal(text: str) -> Value:
    """The value of a number token."""
    mantissa, _, exponent = text.lower().partition("e")
    mantissa = mantissa.replace(",", "").replace(" ", "")
    if len(mantissa) > MAX_CHARS or (exponent and abs(int(exponent)) > 400):
        raise NotRationalError
    value = Fraction("0" + mantissa if mantissa.startswith(".") else mantissa.rstrip("."))
    return simplest(value * Fraction(10) ** int(exponent) if exponent else value)


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
        raise NotRationalError
    return simplest(Fraction(value))


def divided(top: Value, bottom: Value) -> Value:
    if not bottom:
        raise UndefinedError
    return sized(Fraction(top) / Fraction(bottom))


def raised(base: Value, exponent: Value) -> Value:
    """base^exponent for an integer exponent within the caps."""
    if not isinstance(exponent, int) or abs(exponent) > MAX_POWER:
        raise NotRationalError
    if base == 0 and exponent <= 0:
        raise UndefinedError
    if bits(base) * abs(exponent) > MAX_BITS:
        raise NotRationalError
    return simplest(Fraction(base) ** exponent)


def factorial(value: Value) -> Value:
    if not isinstance(value, int) or not 0 <= value <= 500:
        raise NotRationalError
    return sized(math.factorial(value))


def binomial(top: Value, bottom: Value) -> Value:
    if not (isinstance(top, int) and isinstance(bottom, int) and 0 <= bottom <= top <= 1000):
        raise NotRationalError
    return math.comb(top, bottom)


def square_root(value: Value) -> Value:
    """The root of a square of a rational."""
    if value < 0:
        raise NotRationalError
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top != value.numerator or bottom * bottom != value.denominator:
        raise NotRationalError
    return simplest(Fraction(top, bottom))


def rational_value(text: str) -> Value | None:
    """The exact value of cleaned `text`, or None if it is no rational arithmetic.

    Raises `UndefinedError` when it divides by zero."""
    if not text or nesting(text) > MAX_NESTING or re.search(r"[^0-9eE.,!^*/+\-(){} \\a-z]", text):
        return None
    try:
        return Parser(tokens_of(text)).whole()
    except NotRationalError:
        return None
