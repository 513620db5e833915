"""The symbolic source: every solution is right, draws repeat, held-out templates stay apart."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from ratchet.errors import UserError
from ratchet.questions import symbolic
from ratchet.questions.symbolic import draw, load_templates, parse_expression
from tests.conftest import REPO

MANY = draw(6000, seed=3, templates="all")
LINE = re.compile(r"(\d+)([-+*/])(\d+)=<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


def apply(left: int, symbol: str, right: int) -> Fraction:
    """Independent of the module's own arithmetic."""
    if symbol == "+":
        return Fraction(left) + right
    if symbol == "-":
        return Fraction(left) - right
    return Fraction(left) * right if symbol == "*" else Fraction(left, right)


def test_every_annotation_is_right_and_positive() -> None:
    for item in MANY:
        *lines, last = item.reference_solution.split("\n")
        assert len(lines) == item.num_steps
        for line in lines:
            match = LINE.fullmatch(line)
            assert match is not None, line
            left, symbol, right, left2, symbol2, right2, value, shown = match.groups()
            assert (left, symbol, right, value) == (left2, symbol2, right2, shown)
            assert apply(int(left), symbol, int(right)) == int(value), line
            assert 1 <= int(value) <= 99
        assert last == f"#### {item.gold}"
        assert lines[-1].endswith(f">>{item.gold}")


def test_every_operand_is_given_or_worked_out() -> None:
    """A solution uses only numbers of the question, earlier results, and 2 for "half"."""
    for item in MANY:
        known = set(re.findall(r"\d+", item.question)) | (
            {"2"} if "half" in item.question else set()
        )
        for line in item.reference_solution.split("\n")[:-1]:
            match = LINE.fullmatch(line)
            assert match is not None
            assert {match[1], match[3]} <= known, (item.question, line)
            known.add(match[7])


def test_every_number_of_the_question_is_used() -> None:
    for item in MANY:
        operands = re.findall(r"\d+", item.reference_solution)
        assert set(re.findall(r"\d+", item.question)) <= set(operands), item.question


def test_templates() -> None:
    templates = load_templates()
    heldout = [t for t in templates if t.heldout]
    assert len(templates) >= 44
    assert 8 <= len(heldout) <= 12
    assert {t.num_steps for t in heldout} == {1, 2, 3, 4, 5}
    assert {t.num_steps for t in templates if not t.heldout} == {1, 2, 3, 4, 5}


def test_heldout_templates_are_never_seen_ones() -> None:
    names = {t.name for t in load_templates() if t.heldout}
    assert {q.template for q in draw(500, 0, "heldout")} == names
    assert not names & {q.template for q in draw(2000, 0, "seen")}
    assert {q.template for q in MANY} == {t.name for t in load_templates()}
    seen = {q.question for q in draw(2000, 0, "seen")}
    assert not seen & {q.question for q in draw(500, 0, "heldout")}


def test_questions_are_filled_in_short_and_different() -> None:
    assert len({q.question for q in MANY}) == len(MANY)
    for item in MANY:
        assert not re.search(r"[{}<>]", item.question)
        assert len(item.question.split()) <= 45
        assert "None" not in item.question
    people = [name for name, _ in symbolic.word_lists()["name"]]
    for item in draw(300, 0, "all", 4, 4):
        who = [name for name in people if re.search(rf"\b{name}\b", item.question)]
        assert who, item.question


def test_steps_are_limited() -> None:
    assert {q.num_steps for q in draw(300, 1, "all", 2, 3)} == {2, 3}
    assert {q.num_steps for q in draw(60, 1, "heldout", 5, 5)} == {5}


def test_draw_repeats_and_larger_counts_go_on() -> None:
    first = draw(200, 7, "seen")
    assert draw(200, 7, "seen") == first
    assert draw(500, 7, "seen")[:200] == first
    assert draw(200, 8, "seen") != first


def test_draw_is_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from ratchet.questions.symbolic import draw; "
        "print(hashlib.sha256(repr(draw(300, 5, 'all')).encode()).hexdigest())"
    )
    here = hashlib.sha256(repr(draw(300, 5, "all")).encode()).hexdigest()
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=REPO, env={"PYTHONHASHSEED": "123"},
    )  # fmt: skip
    assert there.stdout.strip() == here


def test_drawing_is_fast() -> None:
    draw(10, 0, "all")
    start = time.process_time()
    draw(1000, 11, "all")
    assert time.process_time() - start < 1.0


def test_templates_are_drawn_equally_often() -> None:
    counts: dict[str, int] = {}
    for item in draw(540, 2, "all"):
        counts[item.template] = counts.get(item.template, 0) + 1
    assert set(counts.values()) == {10}


def test_too_many_questions_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "ATTEMPTS", 3)
    monkeypatch.setattr(symbolic, "word_lists", lambda *_: {
        "name": (("Ada", "Ada"),) * 3, "thing": (("pen", "pens"),) * 2, "box": (("box", "boxes"),),
    })  # fmt: skip
    with pytest.raises(UserError, match="lower count=100000"):
        draw(100_000, 0, "seen", 1, 1)


def test_no_template_of_that_length_is_a_user_error() -> None:
    with pytest.raises(UserError, match="has 3 to 2 steps"):
        draw(5, 0, "seen", 3, 2)


WORDS = 'name = [["A", "A"], ["B", "B"], ["C", "C"]]\nthing = [["pen", "pens"]]\n'


def folder_with(tmp_path: Path, template: str) -> Path:
    (tmp_path / "words.toml").write_text(WORDS)
    (tmp_path / "1_step.toml").write_text(template)
    return tmp_path


def test_absent_data_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"words\.toml, which is missing"):
        load_templates(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('steps = ["r = a + b"]\nwordings = ["{a}"]', "before it is known"),
        ('steps = ["r = a ** 2"]\nwordings = ["{a}"]', "a step reads"),
        ('steps = ["r = a + 1"]\nwordings = ["{what}"]', "fill in {what}"),
        ('steps = ["r = a + 1"]\nwordings = ["{r}"]', "fill in {r}"),
        ('steps = ["r = a + 1"]\nwordings = ["{a}"]\nlet = {c = "open(1)"}', "can't read"),
        ('steps = ["r = a + 1"]\nwordings = ["{a}"]\ncolour = 1', "has the fields"),
    ],
)
def test_wrong_templates_are_user_errors(tmp_path: Path, body: str, message: str) -> None:
    folder = folder_with(tmp_path, f"[odd]\nnumbers = {{ a = [1, 9] }}\n{body}\n")
    with pytest.raises(UserError, match=message):
        load_templates(folder)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a + b * 2", 17), ("(a + b) * 2", 22), ("b * a / 3", 10), ("a < b", 1), ("b - a != 1", 0)],
)
def test_expressions(text: str, value: int) -> None:
    assert parse_expression(text, {"a", "b"}, "test")({"a": 5, "b": 6}) == value


def test_a_division_with_a_remainder_is_told_apart() -> None:
    with pytest.raises(symbolic.NotWholeError):
        parse_expression("b / a", {"a", "b"}, "test")({"a": 5, "b": 6})


@pytest.mark.parametrize(
    "text", ["a ** 2", "__import__('os')", "a.b", "1.5", "a < b < 3", "c", "a +"]
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="can't read the expression"):
        parse_expression(text, {"a", "b"}, "test")
