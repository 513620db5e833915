"""Read cleaned LaTeX into an expression tree.

A small recursive-descent reader for the notation answers are written in: arithmetic, powers,
roots, fractions, absolute values, letters with subscripts, elementary functions, pi, e and i. It
refuses (`UnclearError`) whatever can be read in two ways, such as 1/2x, sin xy or f(x).
"""

from __future__ import annotations

import re
from typing import Any

from ratchet.verifier.answers.numbers import GROUPED

Node = tuple[Any, ...]  # (kind, *arguments), see `value`

GREEK = set(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi
    rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi
    Psi Omega ell""".split()  # noqa: SIM905
)
FUNCTIONS = set(
    """sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan ln exp""".split()  # noqa: SIM905
)
TOKEN = re.compile(
    rf"(?P<num>(?:(?:{GROUPED})(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<degree>\^\\circ)"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<letter>[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]{1,4}\}))?)"
    r"|(?P<sign>[-+*/^!(){}\[\]|])"
    r"|(?P<space> +)"
)
OPERATORS = {"cdot", "times", "div"}
APPLIED = set("fghFGHPQ")


class UnclearError(Exception):
    """The text is outside this reader's notation, or can be read in two ways."""


def tokens_of(text: str) -> list[tuple[str, str]]:
    """(kind, text) of every token; commands are a kind of their own."""
    if re.search(r"[A-Za-z]{4}", re.sub(r"\\[A-Za-z]+", " ", text)):
        raise UnclearError
    found: list[tuple[str, str]] = []
    at = 0
    spaced = False
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise UnclearError
        at = match.end()
        kind = str(match.lastgroup)
        if kind == "space":
            spaced = True
            continue
        if spaced and kind == "num" and found and found[-1][0] == "num":
            raise UnclearError
        spaced = False
        token = match[kind]
        found.append((token, token) if kind == "sign" else (kind, token))
    return found


class Reader:
    """Text to expression tree."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens_of(text)
        self.at = 0
        self.in_bars = False

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else ("", "")

    def take(self, kind: str) -> str:
        found, token = self.peek()
        if found != kind:
            raise UnclearError
        self.at += 1
        return token

    def whole(self) -> Node:
        tree = self.sum()
        if self.peek()[0]:
            raise UnclearError
        return tree

    def sum(self) -> Node:
        tree = self.signed()
        while self.peek()[0] in ("+", "-"):
            sign = self.take(self.peek()[0])
            term = self.signed()
            tree = ("add", tree, term if sign == "+" else ("neg", term))
        return tree

    def signed(self) -> Node:
        if self.peek()[0] in ("+", "-"):
            sign = self.take(self.peek()[0])
            term = self.product()
            return ("neg", term) if sign == "-" else term
        return self.product()

    def product(self) -> Node:
        tree = self.power()
        divided = False
        while True:
            kind, token = self.peek()
            if kind in ("*", "/") or (kind == "command" and token in OPERATORS):
                self.at += 1
                divided = kind == "/" or token == "div"
                negative = self.peek()[0] == "-"
                if negative:
                    self.at += 1
                factor = self.power()
                factor = ("neg", factor) if negative else factor
                tree = ("div" if divided else "mul", tree, factor)
            elif self.starts_factor():
                if divided:  # 1/2x
                    raise UnclearError
                if kind == "num":  # x2
                    raise UnclearError
                tree = ("mul", tree, self.power())
            else:
                return tree

    def starts_factor(self) -> bool:
        kind, token = self.peek()
        if kind == "command":
            return token not in OPERATORS
        return kind in ("num", "letter", "(", "{") or (kind == "|" and not self.in_bars)

    def power(self) -> Node:
        tree = self.atom()
        while self.peek()[0] == "!":
            self.at += 1
            tree = ("factorial", tree)
        if self.peek()[0] == "degree":
            self.at += 1
            return ("mul", tree, ("degree",))
        if self.peek()[0] != "^":
            return tree
        self.at += 1
        tree = ("pow", tree, self.exponent())
        if self.peek()[0] in ("^", "!"):
            raise UnclearError
        return tree

    def exponent(self) -> Node:
        if self.peek()[0] == "{":
            return self.group("{", "}")
        if self.peek()[0] == "-":
            self.at += 1
            return ("neg", self.single())
        return self.single()

    def single(self) -> Node:
        """The exponent without braces: TeX takes one sign; more digits than one are unclear."""
        kind, token = self.peek()
        if kind == "num" and not token.isdigit():
            raise UnclearError
        if kind not in ("num", "letter", "command"):
            raise UnclearError
        return self.atom()

    def group(self, opening: str, closing: str) -> Node:
        self.take(opening)
        bars, self.in_bars = self.in_bars, False
        tree = self.sum()
        self.in_bars = bars
        self.take(closing)
        return tree

    def atom(self) -> Node:
        kind, token = self.peek()
        if kind == "num":
            return self.number()
        if kind == "letter":
            return self.letter()
        if kind in ("(", "{", "["):
            return self.group(kind, {"(": ")", "{": "}", "[": "]"}[kind])
        if kind == "|":
            return self.bars()
        if kind == "command":
            self.at += 1
            return self.command(token)
        raise UnclearError

    def number(self) -> Node:
        token = self.take("num").replace(",", "").replace(" ", "")
        tree: Node = ("num", token)
        if self.peek() == ("command", "frac"):
            self.at += 1
            top, bottom = self.group("{", "}"), self.group("{", "}")
            if top[0] == bottom[0] == "num":
                if not (token.isdigit() and 0 < float(top[1]) < float(bottom[1])):
                    raise UnclearError
                return ("add", tree, ("div", top, bottom))
            return ("mul", tree, ("div", top, bottom))
        return tree

    def letter(self) -> Node:
        token = self.take("letter")
        if self.peek()[0] == "(":  # f(x) is no product, and y(t) need not be one
            lone_letter = self.peek(1)[0] == "letter" and self.peek(2)[0] == ")"
            if token[0] in APPLIED or lone_letter:
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
            if self.peek()[0] == "(":
                raise UnclearError
            return ("symbol", "\\" + name)
        if name == "frac":
            return ("div", self.group("{", "}"), self.group("{", "}"))
        if name == "binom":
            return ("binom", self.group("{", "}"), self.group("{", "}"))
        if name == "sqrt":
            index: Node = ("num", "2")
            if self.peek()[0] == "[":
                index = self.group("[", "]")
            return ("root", self.group("{", "}"), index)
        if name in FUNCTIONS:
            return self.function(name)
        raise UnclearError

    def function(self, name: str) -> Node:
        power: Node | None = None
        if self.peek()[0] == "^":
            self.at += 1
            power = self.exponent()
            if power[0] != "num":  # sin^{-1}
                raise UnclearError
        tree: Node = ("call", name, self.argument())
        return tree if power is None else ("pow", tree, power)

    def argument(self) -> Node:
        """What a function is applied to: a group, or a number and at most one letter."""
        kind = self.peek()[0]
        if kind in ("(", "{"):
            tree = self.group(kind, ")" if kind == "(" else "}")
            if self.peek()[0] in ("^", "!"):  # sin(x)^2
                raise UnclearError
            return tree
        tree = self.atom()
        if tree[0] == "num" and self.peek()[0] in ("letter", "command") and self.simple_next():
            tree = ("mul", tree, self.atom())
        if self.peek()[0] == "degree":
            self.at += 1
            tree = ("mul", tree, ("degree",))
        kind, token = self.peek()
        trigonometric = kind == "command" and token in FUNCTIONS
        unclear = kind in ("^", "!", "/", "(") or (self.starts_factor() and not trigonometric)
        if unclear or tree[0] == "call":
            raise UnclearError
        return tree

    def simple_next(self) -> bool:
        kind, token = self.peek()
        return kind == "letter" or token == "pi" or token in GREEK
