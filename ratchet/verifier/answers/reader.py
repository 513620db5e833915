"""Read cleaned LaTeX into an expression tree, for the exact and for the numeric evaluator.

A small recursive-descent reader for the notation answers are written in: arithmetic, powers,
roots, fractions, absolute values, letters with subscripts, elementary functions, pi, e and i. It
refuses (`UnclearError`) whatever can be read in two ways, such as 1/2x, sin xy or f(x).

Read as `plain` arithmetic, a text may hold numbers only, and more ways to write them: mixed
numbers such as 1 1/2, repeating decimals, scientific notation, two signs in a row, 1/2(3).
"""

from __future__ import annotations

import re
from typing import Any

from ratchet.verifier.answers.numbers import (
    GROUPED,
    MAX_CHARS,
    Value,
    decimal_value,
    power_of_ten,
)

Node = tuple[Any, ...]  # (kind, *arguments): `arithmetic.RULES` and `numeric.value` list the kinds

GREEK = set(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi
    rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi
    Psi Omega ell""".split()  # noqa: SIM905
)
FUNCTIONS = set(
    """sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan ln exp""".split()  # noqa: SIM905
)
TOKEN = re.compile(
    r"(?P<repeating>[0-9]*\.[0-9]*\\overline\{[0-9]{1,20}\})"
    rf"|(?P<num>(?:(?:(?:{GROUPED})(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?)"
    r"|(?P<degree>\^\\circ)"
    r"|(?P<sign>\\[A-Za-z]+|[-+*/^!(){}\[\]|])"
    r"|(?P<letter>[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]{1,4}\}))?)"
    r"|(?P<gap>(?<=[0-9.]) +(?=[0-9.]))"
    r"|(?P<space> +)"
)
OPERATORS = {"*", "/", "\\cdot", "\\times", "\\div"}
PLAIN_FACTORS = {"(", "\\frac", "\\binom", "\\sqrt"}  # need no sign for the product before them
PLAIN = {"num", "repeating", "gap", *"+-^!){}", *OPERATORS, *PLAIN_FACTORS}
CLOSING = {"(": ")", "{": "}", "[": "]"}
LOOK_AHEAD = 3
FUNCTION_LETTERS = set("fghFGHPQ")


class UnclearError(Exception):
    """The text is outside the notation, can be read in two ways, or is too large to work out."""


def tokens_of(text: str, plain: bool) -> list[tuple[str, str]]:
    """(kind, text) of every token; signs and commands are their own kinds."""
    if not plain and re.search(r"[A-Za-z]{4}", re.sub(r"\\[A-Za-z]+", " ", text)):
        raise UnclearError
    found: list[tuple[str, str]] = []
    at = 0
    for match in TOKEN.finditer(text):
        if match.start() != at:
            raise UnclearError
        at = match.end()
        kind, token = str(match.lastgroup), match[0]
        if kind == "space":
            continue
        if kind == "sign":
            kind = token
        if plain and kind not in PLAIN:
            raise UnclearError
        found.append((kind, token))
    if at != len(text):
        raise UnclearError
    return found


def literal(token: str) -> Value:
    """The exact value of a number as written."""
    mantissa, _, exponent = token.lower().partition("e")
    if len(mantissa) > MAX_CHARS:
        raise UnclearError
    value = decimal_value(mantissa)
    if not exponent:
        return value
    scaled = power_of_ten(value, int(exponent))
    if scaled is None:
        raise UnclearError
    return scaled


def read(text: str, plain: bool = False) -> Node:
    """The expression tree of cleaned `text`. Raises `UnclearError`."""
    reader = Reader(text, plain)
    tree = reader.sum()
    if reader.peek():
        raise UnclearError
    return tree


class Reader:
    """Text to expression tree."""

    def __init__(self, text: str, plain: bool) -> None:
        self.tokens = [*tokens_of(text, plain), *[("", "")] * LOOK_AHEAD]
        self.plain = plain
        self.at = 0
        self.in_bars = False

    def peek(self, ahead: int = 0) -> str:
        """The kind of the next token, or of one after it; "" at the end."""
        return self.tokens[self.at + ahead][0]

    def take(self, *kinds: str) -> str:
        """The text of the next token, which must be of one of `kinds`."""
        if self.peek() not in kinds:
            raise UnclearError
        self.at += 1
        return self.tokens[self.at - 1][1]

    def took(self, *kinds: str) -> bool:
        """Whether the next token is of one of `kinds`; it is taken then."""
        found = self.peek() in kinds
        self.at += found
        return found

    def sum(self) -> Node:
        tree = self.signed()
        while self.peek() in ("+", "-"):
            minus = self.take("+", "-") == "-"
            term = self.signed()
            tree = ("add", tree, ("neg", term) if minus else term)
        return tree

    def signed(self) -> Node:
        negative = False
        for _ in range(2 if self.plain else 1):
            if self.peek() in ("+", "-"):
                negative ^= self.take("+", "-") == "-"
        term = self.product()
        return ("neg", term) if negative else term

    def product(self) -> Node:
        tree = self.power()
        divided = False
        while True:
            if self.peek() in OPERATORS:
                divided = self.take(*OPERATORS) in ("/", "\\div")
                negative = self.took("-")
                factor = self.power()
                factor = ("neg", factor) if negative else factor
                tree = ("div" if divided else "mul", tree, factor)
            elif self.starts_factor():
                if divided and not self.plain:  # 1/2x
                    raise UnclearError
                tree = ("mul", tree, self.power())
            else:
                return tree

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign for the product (a number never does: x2)."""
        kind = self.peek()
        if self.plain:
            return kind in PLAIN_FACTORS
        if kind.startswith("\\"):
            return kind not in OPERATORS
        return kind in ("letter", "(", "{") or (kind == "|" and not self.in_bars)

    def power(self) -> Node:
        tree = self.atom()
        while self.took("!"):
            tree = ("factorial", tree)
        if self.took("degree"):
            return ("mul", tree, ("degree",))
        if not self.took("^"):
            return tree
        tree = ("pow", tree, self.exponent())
        if self.peek() in ("^", "!"):
            raise UnclearError
        return tree

    def exponent(self) -> Node:
        """A group, or what TeX takes without braces; more of that is clear in plain arithmetic."""
        if self.peek() == "{":
            return self.group("{")
        negative = self.took("-")
        if not self.plain:
            kind, token = self.tokens[self.at]
            whole_number = kind == "num" and token.isdigit()
            if not (whole_number or kind == "letter" or kind.startswith("\\")):
                raise UnclearError
        tree = self.atom()
        return ("neg", tree) if negative else tree

    def group(self, opening: str) -> Node:
        self.take(opening)
        bars, self.in_bars = self.in_bars, False
        tree = self.sum()
        self.in_bars = bars
        self.take(CLOSING[opening])
        return tree

    def atom(self) -> Node:
        kind = self.peek()
        if kind == "num":
            return self.number()
        if kind == "letter":
            return self.letter()
        if kind in CLOSING:
            return self.group(kind)
        if kind == "|":
            return self.bars()
        if kind == "repeating" and self.plain:
            return ("repeating", self.take("repeating"))
        if kind.startswith("\\"):
            return self.command(self.take(kind)[1:])
        raise UnclearError

    def number(self) -> Node:
        """A number, with the fraction after it if it is a mixed number."""
        token = self.take("num").replace(",", "").replace(" ", "")
        tree: Node = ("num", token)
        if self.plain:
            if self.peek() not in ("gap", "\\frac") or not isinstance(literal(token), int):
                return tree
            if self.took("gap"):
                return ("add", tree, self.slashed())
            self.take("\\frac")
            return ("mixed", tree, self.group("{"), self.group("{"))
        if not token[-1].isdigit() or "e" in token.lower():
            raise UnclearError
        if self.took("\\frac"):
            top, bottom = self.group("{"), self.group("{")
            if top[0] == bottom[0] == "num":
                if not (token.isdigit() and 0 < float(top[1]) < float(bottom[1])):
                    raise UnclearError
                return ("add", tree, ("div", top, bottom))
            return ("mul", tree, ("div", top, bottom))
        return tree

    def slashed(self) -> Node:
        """The fraction of a mixed number such as 1 1/2."""
        top = self.take("num")
        self.take("/")
        bottom = self.take("num")
        values = literal(top), literal(bottom)
        if not all(isinstance(value, int) for value in values) or not values[1]:
            raise UnclearError
        return ("div", ("num", top), ("num", bottom))

    def letter(self) -> Node:
        token = self.take("letter")
        if self.peek() == "(":  # f(x) is no product, and y(t) need not be one
            lone_letter = self.peek(1) == "letter" and self.peek(2) == ")"
            if token[0] in FUNCTION_LETTERS or lone_letter:
                raise UnclearError
        if token in ("e", "i"):
            return (token,)
        return ("symbol", token.replace("{", "").replace("}", ""))

    def bars(self) -> Node:
        if self.in_bars:
            raise UnclearError
        self.take("|")
        self.in_bars = True
        tree = self.sum()
        self.in_bars = False
        self.take("|")
        return ("abs", tree)

    def command(self, name: str) -> Node:
        if name == "pi":
            return ("pi",)
        if name in GREEK:
            if self.peek() == "(":
                raise UnclearError
            return ("symbol", "\\" + name)
        if name in ("frac", "binom"):
            return ("div" if name == "frac" else "binom", self.group("{"), self.group("{"))
        if name == "sqrt":
            index = self.group("[") if self.peek() == "[" else ("num", "2")
            return ("root", self.group("{"), index)
        if name in FUNCTIONS:
            return self.function(name)
        raise UnclearError

    def function(self, name: str) -> Node:
        power: Node | None = None
        if self.took("^"):
            power = self.exponent()
            if power[0] != "num":  # sin^{-1}
                raise UnclearError
        tree: Node = ("call", name, self.argument())
        return tree if power is None else ("pow", tree, power)

    def argument(self) -> Node:
        """What a function is applied to: a group, or a number and at most one letter."""
        kind = self.peek()
        if kind in ("(", "{"):
            tree = self.group(kind)
            if self.peek() in ("^", "!"):  # sin(x)^2
                raise UnclearError
            return tree
        tree = self.atom()
        kind = self.peek()
        if tree[0] == "num" and (kind in ("letter", "\\pi") or kind[1:] in GREEK):
            tree = ("mul", tree, self.atom())
        if self.took("degree"):
            tree = ("mul", tree, ("degree",))
        kind = self.peek()
        trigonometric = kind.startswith("\\") and kind[1:] in FUNCTIONS
        unclear = kind in ("^", "!", "/", "(") or (self.starts_factor() and not trigonometric)
        if unclear or tree[0] == "call":
            raise UnclearError
        return tree
