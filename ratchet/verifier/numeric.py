"""The value of cleaned LaTeX at a point, to many digits. Runs inside a worker process.

A small recursive-descent reader for the notation answers are written in: arithmetic, powers,
roots, fractions, absolute values, letters with subscripts, elementary functions, pi, e and i. It
refuses (`UnclearError`) whatever can be read in two ways, such as 1/2x, sin xy or f(x); the
computer-algebra reader, some thirty times as slow, then decides. Odd roots of negative
reals are real. Text that reached here has passed `latex.too_complex`, so sizes are bounded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import mpmath  # type: ignore[import-untyped]

from ratchet.verifier.numbers import GROUPED

Node = tuple[Any, ...]  # (kind, *arguments), see `value`

CONSTANT_DIGITS = 60
POINT_DIGITS = 30
POINTS = 5
GREEK = set(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi
    rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega
    ell""".split()  # noqa: SIM905
)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tan": mpmath.tan,
    "cot": mpmath.cot,
    "sec": mpmath.sec,
    "csc": mpmath.csc,
    "sinh": mpmath.sinh,
    "cosh": mpmath.cosh,
    "tanh": mpmath.tanh,
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "exp": mpmath.exp,
}
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


def symbols_of(tree: Node) -> set[str]:
    """The names in an expression tree."""
    if tree[0] == "symbol":
        return {tree[1]}
    return set().union(*(symbols_of(part) for part in tree[1:] if isinstance(part, tuple)), set())


def rational_exponent(tree: Node) -> tuple[int, int] | None:
    """(p, q) of an exponent written p/q with odd q, or None."""
    if tree[0] == "neg":
        inner = rational_exponent(tree[1])
        return None if inner is None else (-inner[0], inner[1])
    if tree[0] == "div" and tree[1][0] == tree[2][0] == "num":
        top, bottom = tree[1][1], tree[2][1]
        if top.isdigit() and bottom.isdigit() and int(bottom) % 2:
            return int(top), int(bottom)
    return None


def odd_power(base: Any, top: int, bottom: int) -> Any:
    """base^(top/bottom) for a negative real base and odd bottom: the real value."""
    size = mpmath.power(-base, mpmath.mpf(top) / bottom)
    return -size if top % 2 else size


def value(tree: Node, point: dict[str, Any]) -> Any:
    """The value of an expression tree at a point (name → number)."""
    kind = tree[0]
    if kind == "num":
        return mpmath.mpf(tree[1])
    if kind == "symbol":
        return point[tree[1]]
    if kind in ("pi", "e", "i", "degree"):
        return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.j, "degree": mpmath.pi / 180}[kind] * 1
    if kind == "call":
        return FUNCTIONS[tree[1]](value(tree[2], point))
    if kind == "root":
        index = value(tree[2], point)
        base = value(tree[1], point)
        if index == int(mpmath.re(index)) and int(index) % 2 and negative(base):
            return odd_power(mpmath.re(base), 1, int(index))
        return mpmath.power(base, 1 / index)
    if kind == "pow":
        base = value(tree[1], point)
        exact = rational_exponent(tree[2])
        if exact is not None and negative(base):
            return odd_power(mpmath.re(base), *exact)
        return mpmath.power(base, value(tree[2], point))
    first = value(tree[1], point)
    if kind == "neg":
        return -first
    if kind == "abs":
        return mpmath.fabs(first)
    if kind == "factorial":
        return mpmath.factorial(first)
    second = value(tree[2], point)
    if kind == "add":
        return first + second
    if kind == "mul":
        return first * second
    if kind == "div":
        return first / second
    assert kind == "binom", kind
    return mpmath.binomial(first, second)


def negative(number: Any) -> bool:
    return bool(mpmath.im(number) == 0 and mpmath.re(number) < 0)


def points(names: list[str]) -> list[dict[str, Any]]:
    """Fixed pseudo-random points of both signs; the first is positive."""
    rng = random.Random(20_240_229)
    chosen = []
    for count in range(POINTS):
        signs = [1 if count % 3 == 0 or rng.random() < 0.4 else -1 for _ in names]
        sizes = [mpmath.mpf(rng.randint(300, 4000)) / rng.randint(900, 1100) for _ in names]
        chosen.append({n: s * z for n, s, z in zip(names, signs, sizes, strict=True)})
    return chosen


def close(one: Any, other: Any, digits: int) -> bool:
    """Whether two values agree to all but the last few digits."""
    size = max(mpmath.fabs(one), mpmath.fabs(other))
    if not mpmath.isfinite(size):
        raise UnclearError
    return bool(mpmath.fabs(one - other) <= mpmath.mpf(10) ** (8 - digits) * size)


def settled(tree: Node, point: dict[str, Any], digits: int) -> Any:
    """The value of a tree; 0 where it is nothing but rounding, which twice the digits tell."""
    rough = value(tree, point)
    if rough == 0 or mpmath.fabs(rough) > mpmath.mpf(10) ** (8 - digits):
        return rough
    with mpmath.workdps(2 * digits):
        fine = value(tree, point)
        return mpmath.mpf(0) if mpmath.fabs(fine) < mpmath.fabs(rough) * 1e-12 else fine


def evaluations(trees: list[Node], digits: int) -> list[list[Any] | None]:
    """The values of all trees at each point, None where one of them is undefined. One point when
    there are no names. Call under `mpmath.workdps`."""
    names = sorted(set().union(*(symbols_of(tree) for tree in trees)))
    rows: list[list[Any] | None] = []
    for point in points(names) if names else [{}]:
        try:
            rows.append([settled(tree, point, digits) for tree in trees])
        except (ZeroDivisionError, ValueError, OverflowError):
            rows.append(None)
    return rows


def digits_for(trees: list[Node]) -> int:
    return POINT_DIGITS if any(symbols_of(tree) for tree in trees) else CONSTANT_DIGITS


def numerically_equal(gold: str, answer: str) -> bool:
    """Whether two cleaned scalars have the same value everywhere. UnclearError if unreadable or
    undefined at too many points."""
    trees = [Reader(gold).whole(), Reader(answer).whole()]
    digits = digits_for(trees)
    with mpmath.workdps(digits):
        rows = [row for row in evaluations(trees, digits) if row is not None]
        if len(rows) < (3 if symbols_of(trees[0]) or symbols_of(trees[1]) else 1):
            raise UnclearError
        return all(close(one, other, digits) for one, other in rows)


def constant(text: str) -> Any:
    """The value of cleaned `text`. UnclearError if it holds names or is undefined."""
    tree = Reader(text).whole()
    if symbols_of(tree):
        raise UnclearError
    with mpmath.workdps(CONSTANT_DIGITS):
        row = evaluations([tree], CONSTANT_DIGITS)[0]
        if row is None:
            raise UnclearError
        return row[0]


def proportion(gold: tuple[str, str], answer: tuple[str, str]) -> int:
    """The sign of the constant c with gold left - right = c (answer left - right); 0 if none."""
    trees = [
        ("add", Reader(left).whole(), ("neg", Reader(right).whole()))
        for left, right in (gold, answer)
    ]
    if symbols_of(trees[0]) != symbols_of(trees[1]):
        return 0
    with mpmath.workdps(POINT_DIGITS):
        rows = [row for row in evaluations(trees, POINT_DIGITS) if row is not None]
        if len(rows) < 3 or any(one == 0 or other == 0 for one, other in rows):
            raise UnclearError
        ratio = rows[0][0] / rows[0][1]
        if not all(close(one, ratio * other, POINT_DIGITS) for one, other in rows):
            return 0
        if mpmath.im(ratio) != 0:
            return 0
        return 1 if mpmath.re(ratio) > 0 else -1
