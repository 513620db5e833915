"""Take a cleaned answer apart: list, set, tuple or interval, union, matrix, words, ratio, relation,
or a single value. Nothing here compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ratchet.verifier.answers.arithmetic import rational_value
from ratchet.verifier.answers.latex import closing, squashed
from ratchet.verifier.answers.numbers import SCALE, Value
from ratchet.verifier.answers.units import split_unit

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z][A-Za-z'-]*)*\.?")
ONLY_TEXT = re.compile(r"(?:\\text\{[^{}]*\} *)+")
FUNCTIONS = re.compile(
    r"\\?(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|max|min|gcd|lcm|infty)(?![a-z])"
)
SIGN = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim)(?![A-Za-z])|(?<![\\<>])[=<>]")
MATRIX = re.compile(
    r"(?:[\[(] *)?\\begin\{(?P<env>[pbB]?matrix|array)\}(?:\{[lcr| ]*\})?"
    r"(?P<body>.*?)\\end\{(?P=env)\}(?: *[\])])?"
)
AFTER_COMMA = re.compile(r"[,;] *(?:\\text\{ *,? *)?(?:and|or)? *\}?(?![A-Za-z])")
CONJUNCTION = re.compile(r"\\text\{ *,? *(?:and|or) *,? *\}|(?<![A-Za-z\\])(?:and|or)(?![a-z])")
SCALED = re.compile(rf"(.*[0-9}})]) *(?:\\text\{{ *)?({'|'.join(SCALE)}) *\}}?")
GROUPED_RUN = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
CLOSERS = {"(": ")", "[": "]", "\\{": "\\}"}
LETTERS = re.compile(r"\\text\{ *([A-Z](?:(?:, *| *,? *and )[A-Z])+) *\}")
SAME_SET = {
    "\\mathbb{R}": "(-\\infty,\\infty)",
    "\\{\\}": "\\emptyset",
    "\\text{empty set}": "\\emptyset",
    "\\text{the empty set}": "\\emptyset",
}


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
    while end < len(text) and (
        text[end].isdigit() or (text[end] == "," and text[end + 1 : end + 2].isdigit())
    ):
        end += 1
    return end > at and GROUPED_RUN.fullmatch(text, start, end) is not None


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
    if "\\pm" not in text:
        text = text.replace("\\mp", "\\pm")
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
    """Exact value of a scalar with its unit dropped or its scale word (5 million) worked out."""
    value = rational_value(text)
    if value is not None:
        return value
    scaled = SCALED.fullmatch(text)
    if scaled:
        value = rational_value(scaled[1].rstrip())
        return None if value is None else value * SCALE[scaled[2]]
    bare, unit = split_unit(text)
    return rational_value(bare) if unit is not None else None
