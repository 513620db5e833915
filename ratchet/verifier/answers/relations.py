"""Equations, inequalities and membership taken apart: names and values, ranges, chains."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ratchet.verifier.answers.shapes import FUNCTIONS, Kind, Shape, enclosed, rational

NAME_PART = (
    r"(?>\\[A-Za-z]++|[A-Za-z])'*+(?>_(?:\{[^{}]*\}|[A-Za-z0-9]))?+(?>\^\{-1\})?+"
    r"(?> ?\((?:[A-Za-z]|-?[0-9]+)(?:, ?(?:[A-Za-z]|-?[0-9]+))*\))?+ ?+[:/]?+ ?+"
)
NAME = re.compile(
    rf"(?>{NAME_PART})+"
    r"|\|[A-Z]{1,3}\||\\(?:angle|overline|vec|hat|bar) *\{?(?:[A-Z]{1,3}|[a-z])\}?"
    r"|\\frac\{[A-Z]{1,3}\}\{[A-Z]{1,3}\}"
)
SUBSCRIPT = re.compile(r"_\{[^{}]*\}")
# Names only where "= value" follows: a bound on |z| is no bound on z.
VALUE_NAME = re.compile(
    r"\\text\{(?! *not\b)[A-Za-z ]+\}|\|[a-z]\||\[[A-Z]{3,6}\]"
    r"|\\frac\{d[a-z]?\}\{d[a-z]\}(?:\([a-z]\))?"
)
FLIP = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


@dataclass(frozen=True, slots=True)
class Range:
    """An inequality in one name as an interval."""

    name: str
    low: str
    high: str
    brackets: str


def is_name(text: str) -> bool:
    """Whether `text` only names a thing (x, f(x), AB, |AB|, x_1, (p,q)), so that "= value"
    after it gives its value."""
    whole = enclosed(text)
    if whole and whole[0] == "()":
        return all(is_name(item.strip()) for item in whole[1].split(","))
    return NAME.fullmatch(text) is not None and not FUNCTIONS.search(SUBSCRIPT.sub("", text))


def names_value(text: str) -> bool:
    """Whether "= value" after `text` gives the value of what `text` names."""
    return is_name(text) or VALUE_NAME.fullmatch(text.strip()) is not None


def assignment(shape: Shape) -> tuple[str, str] | None:
    """(name, value) of `name = … = value`, `name \\in set` and `x \\approx 3`, or None."""
    if shape.kind is not Kind.RELATION:
        return None
    signs = shape.mark.split()
    if signs[-1] == "\\approx":
        if not shape.items[0]:
            return "", shape.items[-1]
        if len(signs) == 1 and is_name(shape.items[0]):
            return shape.items[0], shape.items[-1]
        if len(signs) == 1:
            return "", shape.items[0]  # an exact value and what it is about
        return assignment(Shape(Kind.RELATION, shape.text, shape.items[:-1], " ".join(signs[:-1])))
    if set(signs) <= {"="} and names_value(shape.items[0]) and one_value(shape.items[1:]):
        return shape.items[0], shape.items[-1]
    if signs == ["\\in"] and is_name(shape.items[0]):
        return shape.items[0], shape.items[1]
    return None


def one_value(items: tuple[str, ...]) -> bool:
    """Whether the rationals among the parts of a chain are all the same (not x = 3 = 2)."""
    values = [value for item in items if (value := rational(item)) is not None]
    return len(set(values)) <= 1


def as_range(shape: Shape) -> Range | None:
    """An inequality `a < x \\le b` or `x > a` as a range, or None."""
    if shape.kind is not Kind.RELATION:
        return None
    items, signs = list(shape.items), shape.mark.split()
    if any(sign not in FLIP for sign in signs) or len(items) > 3:
        return None
    if signs[0] in (">", "\\ge"):
        items, signs = items[::-1], [FLIP[sign] for sign in reversed(signs)]
    if any(sign not in ("<", "\\le") for sign in signs):
        return None
    closed = [sign == "\\le" for sign in signs]
    if len(items) == 3:
        name = items[1]
        low, high, brackets = items[0], items[2], "[("[not closed[0]] + "])"[not closed[1]]
    elif is_name(items[0]):
        name, low, high = items[0], "-\\infty", items[1]
        brackets = "(" + "])"[not closed[0]]
    elif is_name(items[1]):
        name, low, high = items[1], items[0], "\\infty"
        brackets = "[("[not closed[0]] + ")"
    else:
        return None
    if not is_name(name) or is_name(low) or is_name(high):
        return None
    return Range(name, low, high, brackets)


def upward(shape: Shape) -> Shape:
    """A chain of > and \\ge turned round to < and \\le."""
    signs = shape.mark.split()
    if set(signs) <= {">", "\\ge"}:
        mark = " ".join(FLIP[sign] for sign in reversed(signs))
        return Shape(shape.kind, shape.text, shape.items[::-1], mark)
    return shape


def range_of_interval(shape: Shape) -> Range | None:
    """An interval as a range without a name, or None."""
    if shape.kind is not Kind.TUPLE or len(shape.items) != 2:
        return None
    return Range("", shape.items[0], shape.items[1], shape.mark)
