"""Compare cleaned LaTeX by value, to many digits. Runs inside a worker process.

`reader` makes the expression trees; what it finds unclear, the computer-algebra reader, some
thirty times as slow, decides. Odd roots of negative reals are real. Text that comes here has
passed `latex.too_complex`, so sizes are bounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

from ratchet.verifier.answers.reader import Node, UnclearError, read

CONSTANT_DIGITS = 60
POINT_DIGITS = 30
POINTS = 5
APPLY: dict[str, Callable[[Any], Any]] = {
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
        return APPLY[tree[1]](value(tree[2], point))
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


@lru_cache(maxsize=1024)
def points(names: tuple[Any, ...]) -> list[dict[Any, Fraction]]:
    """Fixed pseudo-random points of both signs, the first positive; one point without names."""
    rng = random.Random(20_240_229)
    chosen = []
    for count in range(POINTS if names else 1):
        signs = [1 if count % 3 == 0 or rng.random() < 0.4 else -1 for _ in names]
        sizes = [Fraction(rng.randint(300, 4000), rng.randint(900, 1100)) for _ in names]
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


def names_of(trees: list[Node]) -> tuple[str, ...]:
    return tuple(sorted(set().union(*map(symbols_of, trees))))


def evaluations(trees: list[Node], names: tuple[str, ...], digits: int) -> list[list[Any] | None]:
    """The values of all trees at each point, None where one of them is undefined. Call under
    `mpmath.workdps`."""
    rows: list[list[Any] | None] = []
    for exact in points(names):
        point = {name: mpmath.mpf(z.numerator) / z.denominator for name, z in exact.items()}
        try:
            rows.append([settled(tree, point, digits) for tree in trees])
        except (ZeroDivisionError, ValueError, OverflowError):
            rows.append(None)
    return rows


def numerically_equal(gold: str, answer: str) -> bool:
    """Whether two cleaned scalars have the same value everywhere. UnclearError if unreadable or
    undefined at too many points."""
    trees = [read(gold), read(answer)]
    names = names_of(trees)
    digits = POINT_DIGITS if names else CONSTANT_DIGITS
    with mpmath.workdps(digits):
        rows = [row for row in evaluations(trees, names, digits) if row is not None]
        if len(rows) < (3 if names else 1):
            raise UnclearError
        return all(close(one, other, digits) for one, other in rows)


def constant(text: str) -> Any:
    """The value of cleaned `text`. UnclearError if it holds names or is undefined."""
    tree = read(text)
    if symbols_of(tree):
        raise UnclearError
    with mpmath.workdps(CONSTANT_DIGITS):
        row = evaluations([tree], (), CONSTANT_DIGITS)[0]
        if row is None:
            raise UnclearError
        return row[0]


def proportion(gold: tuple[str, str], answer: tuple[str, str]) -> int:
    """The sign of the constant c with gold left - right = c (answer left - right); 0 if none."""
    trees = [("add", read(left), ("neg", read(right))) for left, right in (gold, answer)]
    if symbols_of(trees[0]) != symbols_of(trees[1]):
        return 0
    with mpmath.workdps(POINT_DIGITS):
        rows = [row for row in evaluations(trees, names_of(trees), POINT_DIGITS) if row is not None]
        if len(rows) < 3 or any(one == 0 or other == 0 for one, other in rows):
            raise UnclearError
        return sign_of_ratio(rows, POINT_DIGITS)


def sign_of_ratio(rows: Sequence[Sequence[Any]], digits: int) -> int:
    """The sign of the constant that every row's first value is of its second; 0 if none is."""
    ratio = rows[0][0] / rows[0][1]
    constant = all(close(one, ratio * other, digits) for one, other in rows)
    if not constant or mpmath.im(ratio) != 0:
        return 0
    return 1 if mpmath.re(ratio) > 0 else -1
