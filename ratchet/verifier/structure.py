"""Compare two cleaned answers by their structure, scalar by scalar.

The kind of container must agree: a tuple or interval is not a set, an ordered pair is not a list.
Lists and sets are unordered, tuples and matrices ordered. What a single value equals is decided
by `Scalars`: exactly and locally where both sides are rational (`LocalScalars`), by the symbolic
engine in a worker otherwise. The same code runs on both sides of that line; the local one raises
`UndecidedError` where the engine is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ratchet.verifier.arithmetic import rational_value
from ratchet.verifier.latex import closing, squashed
from ratchet.verifier.numbers import Value, magnitude
from ratchet.verifier.units import split_unit, units_conflict

MAX_ITEMS = 60
MIN_SIGNIFICANT_DIGITS = 6


class UndecidedError(Exception):
    """Only the symbolic engine can tell."""


class Kind(StrEnum):
    SCALAR = "scalar"
    LIST = "list"
    SET = "set"
    TUPLE = "tuple"
    UNION = "union"
    MATRIX = "matrix"
    TEXT = "text"
    RATIO = "ratio"
    RELATION = "relation"


@dataclass(frozen=True, slots=True)
class Shape:
    """One answer taken apart. `items` are cleaned texts; `mark` is the brackets of a tuple, the
    row lengths of a matrix or the relation signs of a chain."""

    kind: Kind
    text: str
    items: tuple[str, ...] = ()
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """An inequality in one name as an interval."""

    name: str
    low: str
    high: str
    brackets: str


WORD = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z][A-Za-z'-]*)*\.?")
ONLY_TEXT = re.compile(r"(?:\\text\{[^{}]*\} *)+")
NAME_PART = (
    r"(?>\\[A-Za-z]++|[A-Za-z])'*+(?>_(?:\{[^{}]*\}|[A-Za-z0-9]))?+"
    r"(?> ?\([A-Za-z](?:, ?[A-Za-z])*\))?+ ?+[:/]?+ ?+"
)
NAME = re.compile(
    rf"(?>{NAME_PART})+"
    r"|\|[A-Z]{1,3}\||\\(?:angle|overline|vec|hat|bar) *\{?[A-Z]{1,3}\}?"
    r"|\\frac\{[A-Z]{1,3}\}\{[A-Z]{1,3}\}"
)
FUNCTIONS = re.compile(
    r"\\?(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|max|min|gcd|lcm|infty)(?![a-z])"
)
SIGN = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim)(?![A-Za-z])|(?<![\\<>!])[=<>]")
MATRIX = re.compile(
    r"(?:[\[(] *)?\\begin\{(?P<env>[pbB]?matrix|array)\}(?:\{[lcr| ]*\})?"
    r"(?P<body>.*?)\\end\{(?P=env)\}(?: *[\])])?"
)
AFTER_COMMA = re.compile(r"[,;] *(?:\\text\{ *,? *)?(?:and|or)? *\}?(?![A-Za-z])")
CONJUNCTION = re.compile(r"\\text\{ *,? *(?:and|or) *,? *\}|(?<![A-Za-z\\])(?:and|or)(?![a-z])")
GROUPED_RUN = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
CLOSERS = {"(": ")", "[": "]", "\\{": "\\}"}
FLIP = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
BASE = re.compile(r"(-?)(?:\\text\{ *)?([0-9A-Z]+) *\}?_\{? *([0-9]+) *\}?")
LETTERS = re.compile(r"\\text\{ *([A-Z](?:, *[A-Z])+) *\}")
SAME_SET = {
    "\\mathbb{R}": "(-\\infty,\\infty)",
    "\\{\\}": "\\emptyset",
    "\\text{empty set}": "\\emptyset",
    "\\text{the empty set}": "\\emptyset",
}
INFINITE = {"\\infty": 1, "+\\infty": 1, "-\\infty": -1}


def pieces(text: str, is_cut: Callable[[str, int], int]) -> list[str]:
    """`text` cut at the top level wherever `is_cut(text, at)` gives a length above zero.

    Round and square brackets may close each other (half-open intervals)."""
    parts: list[str] = []
    depth = start = at = 0
    while at < len(text):
        step = 1
        if text.startswith(("\\{", "\\}"), at):
            depth += 1 if text[at + 1] == "{" else -1
            step = 2
        elif text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
        elif depth == 0 and (cut := is_cut(text, at)):
            parts.append(text[start:at].strip())
            start = at + cut
            step = cut
        elif text[at] == "\\":
            step = 2
        at += step
    parts.append(text[start:].strip())
    return parts


def list_cut(text: str, at: int) -> int:
    """Length of a list separator at `at`: comma, semicolon, "and", "or". A comma inside a
    properly grouped number is none."""
    if text[at] in ",;":
        if in_grouped_number(text, at):
            return 0
        match = AFTER_COMMA.match(text, at)
        return match.end() - at if match and match[0].strip(" ,;") else 1
    match = CONJUNCTION.match(text, at)
    return len(match[0]) if match else 0


def in_grouped_number(text: str, at: int) -> bool:
    """Whether the comma at `at` separates thousands."""
    start, end = at, at
    while start > 0 and (text[start - 1].isdigit() or text[start - 1] == ","):
        start -= 1
    while end < len(text) and (text[end].isdigit() or text[end] == ","):
        end += 1
    return GROUPED_RUN.fullmatch(text, start, end) is not None


def listed(text: str) -> list[str]:
    """The items of a top-level list (one item: no list)."""
    return [item for item in pieces(text, list_cut) if item]


def union_cut(text: str, at: int) -> int:
    return 4 if re.compile(r"\\cup(?![A-Za-z])").match(text, at) else 0


def sign_cut(text: str, at: int) -> int:
    match = SIGN.match(text, at)
    return len(match[0]) if match else 0


def enclosed(text: str) -> tuple[str, str] | None:
    """(brackets, content) if one pair of brackets encloses all of `text`, else None."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in CLOSERS:
        return None
    close = "\\}" if text.endswith("\\}") else text[-1:]
    if close not in CLOSERS.values() or (opening == "\\{") != (close == "\\}"):
        return None
    inner = text[len(opening) : len(text) - len(close)]
    depth = 0
    at = 0
    while at < len(inner):
        if inner.startswith(("\\{", "\\}"), at):
            depth += 1 if inner[at + 1] == "{" else -1
            at += 1
        elif inner[at] in "([{":
            depth += 1
        elif inner[at] in ")]}":
            depth -= 1
        if depth < 0:
            return None
        at += 1
    return opening + close, inner.strip()


def group_braces(text: str) -> str:
    """`text` without LaTeX braces that enclose all of it ({1,3} prints as 1,3)."""
    while text.startswith("{") and closing(text, 0, "{", "}") == len(text) - 1:
        text = text[1:-1].strip()
    return text


def words_of(text: str) -> str | None:
    """The words of a text answer in lower case, or None if `text` is no text answer."""
    if ONLY_TEXT.fullmatch(text):
        inner = " ".join(re.findall(r"\\text\{([^{}]*)\}", text))
    elif WORD.fullmatch(text) and len(text.rstrip(".")) > 1 and not FUNCTIONS.search(text):
        inner = text
    else:
        return None
    inner = " ".join(inner.lower().split()).strip(" .,;:")
    return inner.strip("()") if re.fullmatch(r"\(?[a-z]\)?", inner) else inner


def plus_minus(text: str) -> tuple[str, str] | None:
    """The two values of an expression with one ±, or None."""
    if text.count("\\pm") != 1 or "\\mp" in text:
        return None
    before, _, after = text.partition("\\pm")
    return f"{before}+{after}".removeprefix("+").strip(), f"{before}-{after}"


def shape_of(text: str) -> Shape:
    """Take one cleaned answer apart."""
    text = LETTERS.sub(r"\1", group_braces(text))
    text = SAME_SET.get(squashed(text), text)
    whole = enclosed(text)
    if whole and whole[0] == "\\{\\}":
        return Shape(Kind.SET, text, tuple(expanded(listed(whole[1]))))
    if whole and len(items := pieces(whole[1], lambda t, at: int(t[at] in ",;"))) > 1:
        brackets = "()" if len(items) > 2 else whole[0]
        return Shape(Kind.TUPLE, text, tuple(items), brackets)
    if rational(text) is not None:
        return Shape(Kind.SCALAR, text)
    items = expanded(listed(text)) if not ordered_words(text) else [text]
    if len(items) > 1:
        return Shape(Kind.LIST, text, tuple(items))
    parts = pieces(text, sign_cut)
    if len(parts) > 1:
        return Shape(Kind.RELATION, text, tuple(parts), " ".join(signs_of(text)))
    parts = pieces(text, union_cut)
    if len(parts) > 1:
        return Shape(Kind.UNION, text, tuple(parts))
    matrix = MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix["body"]:
        rows = [row.split("&") for row in matrix["body"].strip().removesuffix("\\\\").split("\\\\")]
        cells = tuple(cell.strip() for row in rows for cell in row)
        return Shape(Kind.MATRIX, text, cells, " ".join(str(len(row)) for row in rows))
    if words_of(text) is not None:
        return Shape(Kind.TEXT, text)
    parts = pieces(text, lambda t, at: int(t[at] == ":"))
    if len(parts) > 1:
        return Shape(Kind.RATIO, text, tuple(parts))
    return Shape(Kind.SCALAR, text)


def ordered_words(text: str) -> bool:
    """Whether `text` is a list of words of several letters, which keeps its order."""
    if ONLY_TEXT.fullmatch(text):
        text = " ".join(re.findall(r"\\text\{([^{}]*)\}", text))
    items = [item.strip() for item in text.split(",")]
    return len(items) > 1 and all(len(item) > 1 and WORD.fullmatch(item) for item in items)


def signs_of(text: str) -> list[str]:
    """The relation signs of a chain, in order."""
    found: list[str] = []

    def cut(t: str, at: int) -> int:
        match = SIGN.match(t, at)
        if match:
            found.append(match[0])
        return len(match[0]) if match else 0

    pieces(text, cut)
    return found


def expanded(items: list[str]) -> list[str]:
    """`items` with every ± written out as two."""
    out: list[str] = []
    for item in items:
        both = plus_minus(item)
        out.extend(both or (item,))
    return out


def rational(text: str) -> Value | None:
    """Exact value of a scalar with its unit dropped, or None."""
    value = rational_value(text)
    if value is None:
        bare, unit = split_unit(text)
        if unit is not None:
            value = rational_value(bare)
    return value


class LocalScalars:
    """Decides what rationals, infinities and literal equality can decide."""

    def equal(self, gold: str, answer: str) -> bool:
        """Whether two scalars are equal. Raises `UndecidedError`."""
        if squashed(gold) == squashed(answer):
            return True
        gold, gold_unit = split_unit(gold)
        answer, unit = split_unit(answer)
        if units_conflict(gold_unit, unit):
            return False
        gold, answer = group_braces(gold), group_braces(answer)
        if squashed(gold) == squashed(answer):
            return True
        if gold in INFINITE or answer in INFINITE:
            return INFINITE.get(gold, 0) == INFINITE.get(answer, 2)
        bases = BASE.fullmatch(gold), BASE.fullmatch(answer)
        if any(bases):
            return same_base(*bases)
        one, other = rational_value(gold), rational_value(answer)
        if one is not None and other is not None:
            return values_agree(one, other, gold, answer)
        return self.symbolic(gold, answer)

    def symbolic(self, gold: str, answer: str) -> bool:
        raise UndecidedError

    def proportion(self, gold: tuple[str, str], answer: tuple[str, str]) -> int:
        """The sign of the constant c with gold left - right = c (answer left - right), 0 if
        there is none."""
        raise UndecidedError

    def same_matrix(self, gold: str, answer: str) -> bool:
        """Whether two matrices, at least one written as a sum or product, are equal."""
        raise UndecidedError

    def same_set(self, gold: str, answer: str) -> bool:
        """Whether two sets of numbers, written as unions, differences or ranges, are equal."""
        raise UndecidedError


def same_base(gold: re.Match[str] | None, answer: re.Match[str] | None) -> bool:
    """Whether two numerals with a base subscript are the same numeral."""
    if gold is None or answer is None:
        return False
    same_digits = gold[2].lstrip("0") == answer[2].lstrip("0")
    return gold[1] == answer[1] and int(gold[3]) == int(answer[3]) and same_digits


def values_agree(gold: Value, answer: Value, gold_text: str, answer_text: str) -> bool:
    """Exact equality; or one side is a decimal that rounds a non-terminating other side, to at
    least six significant digits."""
    if gold == answer:
        return True
    sides: list[tuple[Value, Value, str]] = [
        (answer, gold, answer_text),
        (gold, answer, gold_text),
    ]
    for decimal, exact, text in sides:
        if not terminates(exact) and terminates(decimal):
            unit = last_place(text)
            if unit is not None and magnitude(decimal - exact) < unit:
                return True
    return False


def terminates(value: Value) -> bool:
    """Whether a rational has a finite decimal expansion."""
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


def last_place(text: str) -> Value | None:
    """One unit in the last place of a decimal with six significant digits or more, else None."""
    match = re.fullmatch(r"[-+ ]*([0-9,]*)\.([0-9]+)", text.strip())
    if match is None:
        return None
    digits = (match[1].replace(",", "") + match[2]).lstrip("0")
    if len(digits) < MIN_SIGNIFICANT_DIGITS:
        return None
    return rational_value(f"1/10^{len(match[2])}")


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
                return self.equal(gold.text, other[1])
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
        if set(answer.mark.split()) != {"="}:
            return False
        values = [rational(part) for part in answer.items]
        if any(value is None or value != values[-1] for value in values):
            return False
        return self.equal(gold.text, answer.items[-1])

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


def choice(text: str, words: str | None) -> str | None:
    """The letter of a multiple-choice answer: C, (C), C., \\text{(C)}, (C) some text."""
    if words is not None and re.fullmatch(r"\(?[a-z]\)?", words):
        return words.strip("()")
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    match = re.fullmatch(r"\(?([A-Z])(?:\)|[.:](?= ))?(?: +[^-+*/^=<>\\].*)?", bare)
    if match and (len(bare) == 1 or bare[0] == "(" or bare[1:2] in (")", ".", ":")):
        return match[1].lower()
    return None


def is_name(text: str) -> bool:
    """Whether `text` only names a thing (x, f(x), AB, |AB|, x_1, (p,q)), so that "= value"
    after it gives its value."""
    whole = enclosed(text)
    if whole and whole[0] == "()":
        return all(is_name(item.strip()) for item in whole[1].split(","))
    return NAME.fullmatch(text) is not None and not FUNCTIONS.search(text)


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
    if set(signs) <= {"="} and is_name(shape.items[0]) and one_value(shape.items[1:]):
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
