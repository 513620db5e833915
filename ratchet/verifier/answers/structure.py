"""Compare two cleaned answers by their structure, single value by single value.

The kind of container must agree: a tuple or interval is not a set, an ordered pair is not a list.
Lists and sets are unordered, tuples and matrices ordered. What a single value equals is decided
by the scalars given: locally and exactly (`LocalScalars`, which raises `UndecidedError` where it
cannot tell), or by the engine in a worker. The same code runs on both sides of that line.
"""

from __future__ import annotations

import re

from ratchet.verifier.answers.latex import squashed
from ratchet.verifier.answers.relations import (
    FLIP,
    Range,
    as_range,
    assignment,
    range_of_interval,
    upward,
)
from ratchet.verifier.answers.scalars import LocalScalars, UndecidedError
from ratchet.verifier.answers.shapes import Kind, Shape, rational, shape_of, words_of
from ratchet.verifier.answers.units import split_unit

MAX_ITEMS = 60
CONSTANT = re.compile(
    r"\\(?:sqrt|frac|pi|cdot|times|div|ln|log|exp|sin|cos|tan|cot|sec|csc|binom|overline|circ"
    r"|arcsin|arccos|arctan)(?![A-Za-z])|(?<![A-Za-z\\])[ei](?![A-Za-z])"
)
# A choice whose text names another one, or takes it back, is no choice.
HEDGE = re.compile(
    r"\([A-Z]\)|\b[B-H]\b|\bA[):]|\b(?:or|either|maybe|perhaps|wrong|incorrect|except)\b"
    r"|\b(?:not|isn't) *$"
)


class Comparison:
    """Structural equality of a gold answer and an answer."""

    def __init__(self, scalars: LocalScalars) -> None:
        self.scalars = scalars

    def equal(self, gold: str, answer: str) -> bool:
        """Whether `answer` is right for `gold`, both cleaned. Raises `UndecidedError`."""
        if squashed(gold) == squashed(answer):
            return True
        one, other = shape_of(gold), shape_of(answer)
        collections = (Kind.LIST, Kind.SET)
        if other.kind is Kind.LIST and one.kind not in collections:
            return all(self.equal(gold, item) for item in other.items)  # one answer, said twice
        if Kind.RELATION in (one.kind, other.kind):
            return self.relations(one, other)
        if one.kind in collections and other.kind in collections:
            return self.unordered(one, other)
        if Kind.TEXT in (one.kind, other.kind):
            return self.texts(one, other)
        if one.kind != other.kind:
            return self.different_kinds(one, other)
        if one.kind in (Kind.TUPLE, Kind.MATRIX, Kind.RATIO):
            return one.mark == other.mark and self.ordered(one.items, other.items)
        if one.kind is Kind.UNION:
            return self.matched(one.items, other.items) or self.scalars.same_set(gold, answer)
        letters = choice(one.text, None), choice(other.text, None)
        if None not in letters and max(len(one.text), len(other.text)) > 1:
            return letters[0] == letters[1]
        return self.scalars.equal(one.text, other.text)

    def different_kinds(self, gold: Shape, answer: Shape) -> bool:
        """Kinds differ, so the answer is wrong, except where one thing is written in two ways."""
        if (
            Kind.MATRIX in (gold.kind, answer.kind)
            and "\\begin" in gold.text
            and ("\\begin" in answer.text)
        ):
            return self.scalars.same_matrix(gold.text, answer.text)
        if gold.kind in (Kind.LIST, Kind.SET) and re.fullmatch(r"[0-9]+(?:,[0-9]+)+", answer.text):
            return self.matched(gold.items, tuple(answer.text.split(",")))
        if Kind.UNION in (gold.kind, answer.kind) and Kind.LIST not in (gold.kind, answer.kind):
            return self.scalars.same_set(gold.text, answer.text)
        return False

    def ordered(self, gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Whether items agree one by one. A local No wins over an open question."""
        if len(gold) != len(answer):
            return False
        open_question = False
        for one, other in zip(gold, answer, strict=True):
            try:
                if not self.equal(one, other):
                    return False
            except UndecidedError:
                open_question = True
        if open_question:
            raise UndecidedError
        return True

    def unordered(self, gold: Shape, answer: Shape) -> bool:
        """Sets drop repetitions; a list keeps those of the gold answer."""
        ones, others = list(gold.items), list(answer.items)
        if Kind.SET in (gold.kind, answer.kind):
            ones = self.distinct(ones)
        if answers_names(ones, others):
            return self.ordered(tuple(ones), tuple(others))
        if len(self.distinct(ones)) == len(ones):
            others = self.distinct(others)
        return self.matched(tuple(ones), tuple(others))

    def distinct(self, items: list[str]) -> list[str]:
        kept: dict[object, str] = {}
        for item in items:
            value = rational(item)
            kept.setdefault(squashed(item) if value is None else value, item)
        return list(kept.values())

    def matched(self, gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Whether the items pair off in some order."""
        if len(gold) != len(answer):
            return False
        ones = [value for item in gold if (value := rational(item)) is not None]
        others = [value for item in answer if (value := rational(item)) is not None]
        if len(ones) == len(gold) and sorted(ones) == sorted(others):
            return True
        if len(gold) > MAX_ITEMS:
            return False
        return self.paired(gold, answer)

    def paired(self, gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
        """Pair items off, sure matches first."""
        left = list(answer)
        later: list[str] = []
        for one in gold:
            sure = None
            open_question = False
            for other in left:
                try:
                    if self.equal(one, other):
                        sure = other
                        break
                except UndecidedError:
                    open_question = True
            if sure is not None:
                left.remove(sure)
            elif open_question:
                later.append(one)
            else:
                return False
        if later:
            raise UndecidedError
        return True

    def texts(self, gold: Shape, answer: Shape) -> bool:
        """Words compare without case; a choice is its letter."""
        one, other = words_of(gold.text), words_of(answer.text)
        if one is None or other is None:
            if same_letters(gold.text, answer.text):
                return self.scalars.equal(gold.text, answer.text)
            return choice(gold.text, one) is not None and choice(gold.text, one) == choice(
                answer.text, other
            )
        if one == other or one.replace(" ", "") == other.replace(" ", ""):
            return True
        letters = choice(gold.text, one), choice(answer.text, other)
        if letters[0] is not None and letters[0] == letters[1]:
            return True
        bare = "\\" not in gold.text + answer.text and max(len(one), len(other)) <= 3
        if bare and sorted(one) == sorted(other):
            return self.scalars.equal(gold.text, answer.text)  # abc and cab may be products
        return False

    def relations(self, gold: Shape, answer: Shape) -> bool:
        """Equations, inequalities and membership; a bare value stands for `name = value`."""
        one, other = assignment(gold), assignment(answer)
        if gold.kind is not Kind.RELATION:
            if other is not None:
                named = answer.items[1:] if set(answer.mark.split()) == {"="} else ()
                return self.equal(gold.text, other[1]) and self.one_constant(named)
            return self.true_chain(gold, answer)
        if answer.mark == "\\in" and as_range(gold) is not None:
            answer = shape_of(answer.items[1])
        if answer.kind is not Kind.RELATION:
            if one is not None:
                return self.equal(one[1], answer.text)
            if as_range(gold) is not None:
                return self.ranges(as_range(gold), range_of_interval(answer), False)
            return self.chain_value(gold, answer)
        if one is not None and other is not None and squashed(one[0]) == squashed(other[0]):
            return self.equal(one[1], other[1])
        ranges = as_range(gold), as_range(answer)
        if None not in ranges:
            return self.ranges(*ranges, True)
        return self.same_relation(upward(gold), upward(answer))

    def same_relation(self, gold: Shape, answer: Shape) -> bool:
        """Two equations or inequalities are equal part by part or as multiples of each other."""
        if gold.mark != answer.mark:
            return False
        if len(gold.items) > 2 or len(answer.items) > 2:
            return self.ordered(gold.items, answer.items)
        sign = self.scalars.proportion(
            (gold.items[0], gold.items[1]), (answer.items[0], answer.items[1])
        )
        return sign > 0 if gold.mark in FLIP else sign != 0

    def true_chain(self, gold: Shape, answer: Shape) -> bool:
        """An answer such as 2+5=7: true arithmetic whose last part is the value."""
        if set(answer.mark.split()) != {"="} or not all(map(is_constant, answer.items)):
            return False
        return self.equal(gold.text, answer.items[-1]) and self.one_constant(answer.items)

    def one_constant(self, parts: tuple[str, ...]) -> bool:
        """Whether the parts of a chain that hold no names all have the value of the last."""
        return all(self.equal(parts[-1], part) for part in parts[:-1] if is_constant(part))

    def chain_value(self, gold: Shape, answer: Shape) -> bool:
        """A gold such as 0.56 = 56%: any of its values is right."""
        if set(gold.mark.split()) != {"="} or any(rational(part) is None for part in gold.items):
            return False
        return any(self.equal(part, answer.text) for part in gold.items)

    def ranges(self, gold: Range | None, answer: Range | None, named: bool) -> bool:
        """Whether two inequalities (or an inequality and an interval) are the same range."""
        if gold is None or answer is None or gold.brackets != answer.brackets:
            return False
        if named and squashed(gold.name) != squashed(answer.name):
            return False
        return self.ordered((gold.low, gold.high), (answer.low, answer.high))


def is_constant(text: str) -> bool:
    """Whether a text has a value of its own: numbers, roots, pi, functions of them, no names."""
    return bool(text) and not re.search(r"[A-Za-z]", CONSTANT.sub(" ", split_unit(text)[0]))


def same_letters(one: str, other: str) -> bool:
    """Whether one text is two to four letters side by side and the other an expression in just
    these letters, so that both may be the same product."""
    word, expression = (one, other) if re.fullmatch(r"[A-Za-z]{2,4}", one) else (other, one)
    if not re.fullmatch(r"[A-Za-z]{2,4}", word) or "\\text" in expression:
        return False
    return set(word) == set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", expression)))


def answers_names(gold: list[str], answer: list[str]) -> bool:
    """Whether the gold names different things (x = 2, y = 3) and the answer only lists values,
    which then have to come in the same order."""
    named = [assignment(shape_of(item)) for item in gold]
    names = {pair[0] for pair in named if pair is not None}
    bare = all(shape_of(item).kind is not Kind.RELATION for item in answer)
    return bare and None not in named and len(names) == len(gold) > 1


def choice(text: str, words: str | None) -> str | None:
    """The letter of a multiple-choice answer: C, (C), C., \\text{(C)}, (C) some text."""
    if words is not None and re.fullmatch(r"\(?[a-z]\)?", words):
        return words.strip("()")
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    match = re.fullmatch(r"\(?([A-Z])(?:\)|[.:](?= ))?( +[^-+*/^=<>\\].*)?", bare)
    if match and HEDGE.search(match[2] or ""):
        return None
    if match and (len(bare) == 1 or bare[0] == "(" or bare[1:2] in (")", ".", ":")):
        return match[1].lower()
    return None
