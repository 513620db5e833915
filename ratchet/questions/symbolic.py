"""Grade-school word problems from our own templates, with drawn names and numbers.

An endless, uncontaminated supply of questions of graded difficulty. A template (a table in
`data/symbolic/*.toml`, whose README tells the fields) holds wordings, ranges for its numbers and
one operation per reasoning step. A draw is kept when every step gives a positive integer of at
most `LARGEST`. Templates marked `heldout` are never trained on, so that learning a template and
learning to solve can be told apart.

Draws depend on the seed and the template files only: of the standard generator just `random()` is
used, whose sequence Python guarantees for every version and platform. A larger count continues
the same sequence. Template expressions go through a small parser of our own, never `eval`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ratchet.errors import UserError
from ratchet.places import DATA

TEMPLATES = DATA / "symbolic"
LARGEST = 99
"""Largest number that may occur in a question or a step: a tiny model must be able to learn it."""
ATTEMPTS = 500
"""Draws of one template in a row without a new question after which it counts as used up."""

Which = Literal["seen", "heldout", "all"]
Values = Mapping[str, int]
Evaluator = Callable[[Values], int]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_FIELDS = {"heldout", "numbers", "let", "require", "steps", "wordings"}


class NotWholeError(ArithmeticError):
    """A division in a template left a remainder: these numbers don't fit."""


@dataclass(frozen=True)
class SymbolicQuestion:
    """One drawn question with its gold answer and annotated reference solution."""

    question: str
    gold: str
    reference_solution: str
    num_steps: int
    template: str


@dataclass(frozen=True)
class Step:
    """One operation: `result = left symbol right`; the operands are names or integers."""

    result: str
    left: str
    symbol: str
    right: str

    def solve(self, values: Values) -> tuple[str, int]:
        """The operation with its numbers filled in, and its value."""
        left, right = _operand(self.left, values), _operand(self.right, values)
        return f"{left}{self.symbol}{right}", apply(left, self.symbol, right)


@dataclass(frozen=True)
class Template:
    """A kind of question, parsed."""

    name: str
    heldout: bool
    numbers: tuple[tuple[str, int, int], ...]
    let: tuple[tuple[str, Evaluator], ...]
    require: tuple[Evaluator, ...]
    steps: tuple[Step, ...]
    wordings: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """Number of reasoning steps; the question's difficulty."""
        return len(self.steps)


def draw(
    count: int, seed: int, templates: Which = "seen", min_steps: int = 1, max_steps: int = 5
) -> list[SymbolicQuestion]:
    """`count` different questions; every template is used equally often, in shuffled rounds.

    UserError when no template has `min_steps` to `max_steps` steps, when they can't give `count`
    different questions, or when the template files are missing or wrong.
    """
    chosen = [t for t in load_templates() if t.heldout or templates != "heldout"]
    chosen = [t for t in chosen if not t.heldout or templates != "seen"]
    chosen = [t for t in chosen if min_steps <= t.num_steps <= max_steps]
    if not chosen:
        raise UserError(
            f"no symbolic template ({templates}) has {min_steps} to {max_steps} steps: "
            "steps go from 1 to 5, min_steps must not exceed max_steps"
        )
    rng = random.Random(f"ratchet symbolic {seed}")
    questions: dict[str, SymbolicQuestion] = {}
    while len(questions) < count and chosen:
        for template in _shuffled(chosen, rng):
            drawn = _draw_new(template, rng, questions)
            if drawn is None:
                chosen.remove(template)
            elif len(questions) < count:
                questions[drawn.question] = drawn
    if len(questions) < count:
        raise UserError(
            f"the symbolic templates ({templates}, {min_steps} to {max_steps} steps) gave only "
            f"{len(questions)} different questions: lower count={count} or allow more templates"
        )
    return list(questions.values())


@lru_cache(maxsize=4)
def load_templates(folder: Path = TEMPLATES) -> tuple[Template, ...]:
    """All templates in `folder`, by step count and name. UserError for missing or wrong files."""
    lists = word_lists(folder)
    found: list[Template] = []
    for path in sorted(folder.glob("*_step*.toml")):
        for name, table in _read(path).items():
            found.append(_parse_template(name, table, lists, f"{path.name}: {name}"))
    if not found:
        raise UserError(f"no templates (*_step*.toml) in {folder}: check out the data folder")
    names = [t.name for t in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"template names must be unique; used twice: {', '.join(sorted(twice))}")
    return tuple(sorted(found, key=lambda t: (t.num_steps, t.name)))


@lru_cache(maxsize=4)
def word_lists(folder: Path = TEMPLATES) -> dict[str, tuple[tuple[str, str], ...]]:
    """Word lists by name; each word is (singular, plural). `name` holds the people."""
    tables = _read(folder / "words.toml")
    lists = {key: tuple((one, many) for one, many in words) for key, words in tables.items()}
    if len(lists.get("name", ())) < 3:
        raise UserError(f"{folder / 'words.toml'} needs a list 'name' of at least three names")
    return lists


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(
            f"symbolic questions need {path}, which is missing: run from a checkout of the project"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _shuffled(items: list[Template], rng: random.Random) -> list[Template]:
    return sorted(items, key=lambda _: rng.random())


def _below(rng: random.Random, n: int) -> int:
    return int(rng.random() * n)


def _draw_new(
    template: Template, rng: random.Random, taken: Mapping[str, SymbolicQuestion]
) -> SymbolicQuestion | None:
    """A question of `template` that is not in `taken`; None once it seems used up."""
    for _ in range(ATTEMPTS):
        values = _draw_values(template, rng)
        if values is None:
            continue
        lines, gold = _solve(template, values)
        if gold is None:
            continue
        text = _fill(template.wordings[_below(rng, len(template.wordings))], values, rng)
        if text not in taken:
            lines.append(f"#### {gold}")
            solution = "\n".join(lines)
            return SymbolicQuestion(text, str(gold), solution, template.num_steps, template.name)
    return None


def _draw_values(template: Template, rng: random.Random) -> dict[str, int] | None:
    """Numbers for a template, or None when they break one of its constraints."""
    values = {name: low + _below(rng, high - low + 1) for name, low, high in template.numbers}
    try:
        for name, value in template.let:
            values[name] = value(values)
        fits = all(condition(values) for condition in template.require)
    except NotWholeError:
        return None
    return values if fits and all(0 < v <= LARGEST for v in values.values()) else None


def _solve(template: Template, values: dict[str, int]) -> tuple[list[str], int | None]:
    """Annotated solution lines and the answer; None when a step leaves 1 to LARGEST."""
    known = dict(values)
    lines: list[str] = []
    for step in template.steps:
        try:
            expression, value = step.solve(known)
        except NotWholeError:
            return [], None
        if not 0 < value <= LARGEST:
            return [], None
        known[step.result] = value
        lines.append(f"{expression}=<<{expression}={value}>>{value}")
    return lines, value


def _fill(wording: str, values: Values, rng: random.Random) -> str:
    """The wording with its numbers, people and words filled in, all different."""
    lists = word_lists()
    words: dict[str, str] = {key: str(value) for key, value in values.items()}
    left = {kind: list(pairs) for kind, pairs in lists.items()}
    for key in dict.fromkeys(_PLACEHOLDER.findall(wording)):
        if key not in words:
            pool = left[word_list(key)]
            slot = key.removesuffix("_one")
            words[f"{slot}_one"], words[slot] = pool.pop(_below(rng, len(pool)))
    return _PLACEHOLDER.sub(lambda match: words[match[1]], wording)


def word_list(key: str) -> str:
    """The word list of a placeholder: `thing` for {thing}, {thing_one} and {thing2}."""
    return key.removesuffix("_one").rstrip("23")


def _parse_template(
    name: str, table: dict[str, Any], lists: Mapping[str, Any], where: str
) -> Template:
    unknown = set(table) - _FIELDS
    if unknown or not {"numbers", "steps", "wordings"} <= set(table):
        raise UserError(f"{where}: a template has the fields {', '.join(sorted(_FIELDS))}")
    numbers = tuple((key, low, high) for key, (low, high) in table["numbers"].items())
    known = {key for key, _, _ in numbers}
    let: list[tuple[str, Evaluator]] = []
    for key, text in table.get("let", {}).items():
        let.append((key, parse_expression(text, known, where)))
        known.add(key)
    require = tuple(parse_expression(text, known, where) for text in table.get("require", []))
    asked = set(known)
    steps: list[Step] = []
    for text in table["steps"]:
        steps.append(_parse_step(text, known, where))
        known.add(steps[-1].result)
    for wording in table["wordings"]:
        for key in _PLACEHOLDER.findall(wording):
            if key not in asked and word_list(key) not in lists:
                raise UserError(f"{where}: nothing is known to fill in {{{key}}}")
    heldout = bool(table.get("heldout", False))
    return Template(
        name, heldout, numbers, tuple(let), require, tuple(steps), tuple(table["wordings"])
    )


def _parse_step(text: str, known: set[str], where: str) -> Step:
    """`result = left op right`, with operands that are known names or integers."""
    match = re.fullmatch(r"(\w+) = (\w+) ([-+*/]) (\w+)", text)
    if match is None:
        raise UserError(f"{where}: a step reads 'result = left op right', not {text!r}")
    result, left, symbol, right = match.groups()
    for operand in (left, right):
        if operand not in known and not operand.isdecimal():
            raise UserError(f"{where}: step {text!r} uses {operand!r} before it is known")
    return Step(result, left, symbol, right)


def _operand(text: str, values: Values) -> int:
    return values[text] if text in values else int(text)


def _divide(left: int, right: int) -> int:
    if right == 0 or left % right:
        raise NotWholeError
    return left // right


def apply(left: int, symbol: str, right: int) -> int:
    """The value of one operation. NotWholeError when a division leaves a remainder."""
    return _APPLY[symbol](left, right)


_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
}
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.NotEq: operator.ne,
}


def parse_expression(text: str, known: set[str], where: str) -> Evaluator:
    """A function of the drawn numbers for `text`: integers, known names, + - * / and one
    comparison (< <= > >= !=). Division must leave no remainder (NotWholeError). UserError for
    anything else."""
    try:
        return _build(ast.parse(text, mode="eval").body, known)
    except (SyntaxError, KeyError) as error:
        raise UserError(f"{where}: can't read the expression {text!r}") from error


def _build(node: ast.expr, known: set[str]) -> Evaluator:
    """The evaluator of a syntax tree. KeyError for a node or name that isn't allowed."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
        return lambda _: number
    if isinstance(node, ast.Name) and node.id in known:
        name = node.id
        return lambda values: values[name]
    if isinstance(node, ast.BinOp):
        apply, left, right = _OPERATORS[type(node.op)], node.left, node.right
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        apply, left, right = _OPERATORS[type(node.ops[0])], node.left, node.comparators[0]
    else:
        raise KeyError(type(node).__name__)
    first, second = _build(left, known), _build(right, known)
    return lambda values: apply(first(values), second(values))
