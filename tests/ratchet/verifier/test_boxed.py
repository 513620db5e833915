"""Boxed answers: every row of the policy tables, the adversarial set, extraction, refusals."""

from __future__ import annotations

import json
import re

import pytest

from ratchet.verifier import Status, verify
from ratchet.verifier.answers.latex import clean, too_complex
from ratchet.verifier.extract import boxes
from tests.conftest import REPO

ROW = re.compile(r"\| (?P<what>.+?) \| `(?P<gold>.+?)` \| `(?P<answer>.+?)` \| (?P<right>.+?) \|")
RIGHT = {
    "yes": (Status.OK, True),
    "no": (Status.OK, False),
    "unreadable": (Status.PARSE_FAILURE, False),
    "too complex": (Status.TOO_COMPLEX, False),
}


def policy_rows() -> list[tuple[str, str, str, str, str]]:
    text = (REPO / "docs" / "verifier.md").read_text(encoding="utf-8")
    numbers, _, rest = text.partition("## Boxed answers")
    rows = [("tags", *match.groups()) for match in ROW.finditer(numbers)]
    return rows + [("boxed", *match.groups()) for match in ROW.finditer(rest)]


@pytest.mark.parametrize(
    ("style", "what", "gold", "answer", "right"), policy_rows(), ids=lambda text: str(text)[:40]
)
def test_policy(style: str, what: str, gold: str, answer: str, right: str) -> None:
    shape = {
        "tags": "<start_working_out>w<end_working_out><SOLUTION>{}</SOLUTION>",
        "boxed": "so \\boxed{{{}}}",
    }[style]
    verdict = verify(shape.format(answer), gold, style)
    assert (verdict.status, verdict.lenient) == RIGHT[right], (what, verdict)


def test_policy_tables_are_read() -> None:
    styles = [row[0] for row in policy_rows()]
    assert styles.count("tags") == 30
    assert styles.count("boxed") == 73


def adversarial() -> list[dict[str, str]]:
    path = REPO / "data" / "verifier" / "adversarial.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", adversarial(), ids=lambda case: case["id"])
def test_adversarial(case: dict[str, str]) -> None:
    verdict = verify(case["completion"], case["gold"], case["style"])
    assert verdict.lenient is case["right"], verdict


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ("\\boxed{a} and \\fbox{b}", ["a", "b"]),
        ("\\boxed {5}", ["5"]),
        ("\\boxed 5.", ["5"]),
        ("\\boxed{\\{1,2\\}}", ["\\{1,2\\}"]),
        ("\\boxed{\\frac{1}{2}}", ["\\frac{1}{2}"]),
        ("\\boxed{\\boxed{7}}", ["\\boxed{7}"]),
        ("\\\\boxed{7}", ["7"]),
        ("I used \\boxed as asked", []),
        ("\\boxed{7", [None]),
        ("\\boxed{7} \\boxed", ["7", None]),
        ("\\boxedness{7}", []),
        ("{\\boxed{7}", ["7"]),
    ],
)
def test_boxes(text: str, contents: list[str | None]) -> None:
    assert [box.content for box in boxes(text)] == contents


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\\dfrac12", "\\frac{1}{2}"),
        ("\\frac{\\frac12}3", "\\frac{\\frac{1}{2}}{3}"),
        ("\\left( 3,\\, \\tfrac{\\pi}{2} \\right)", "( 3, \\frac{\\pi}{2} )"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("4\\sqrt(2)", "4\\sqrt{2}"),
        ("11,\\! 111", "11111"),
        ("\\mathrm{E}", "E"),
        ("\\text{ 13 }", "13"),
        ("90°", "90^\\circ"),
        ("5\\text{ percent}", "5%"),
        ("x \\leq 2", "x \\le 2"),
        ("x^(n+1)", "x^{n+1}"),
        ("185\\", "185"),
        ("The answer is: 5.", "5"),
    ],
)
def test_clean(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}", "9^9^9", "2^{30^5}", "10^{-1000000000}", "\\sin(10^{100000})", "1000000!",
        "5!!!!!", "((5!)!)!", "\\binom{1000000000}{5}", "\\sum_{k=1}^{100000000} k", "x__class__",
        "\\int x", "-" * 500, "(" * 20 + "1" + ")" * 20, "1" * 101, "+".join(["x"] * 300),
        "1e999999999",
    ],
)  # fmt: skip
def test_refused_before_the_engine(text: str) -> None:
    assert too_complex(text) is not None


@pytest.mark.parametrize(
    "text",
    ["e^{-x^2}", "2^{100}+\\sqrt{2}", "\\frac{n!}{k!(n-k)!}", "\\binom{20}{3} x", "x^{2018}",
     "\\sum_{k=1}^{100} x_k", "\\sqrt{2+\\sqrt{3+\\sqrt{5}}}"],
)  # fmt: skip
def test_not_refused(text: str) -> None:
    assert too_complex(text) is None
