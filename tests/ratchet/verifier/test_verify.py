"""Verdicts worked out by hand: numbers, formats, statuses."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from ratchet.errors import UserError
from ratchet.verifier import Status, Style, Verdict, status_rates, verify, verify_batch
from ratchet.verifier.answers.numbers import read_number


def tagged(answer: str, working: str = "24 + 24 = 48") -> str:
    return f"<start_working_out>{working}<end_working_out>\n<SOLUTION>{answer}</SOLUTION>"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-3", -3),
        ("−3", -3),
        ("– 3", -3),
        ("+7", 7),
        ("1,000", 1000),
        ("12,345,678.50", Fraction(24691357, 2)),
        ("9{,}500", 9500),
        ("11,\\! 111", 11111),
        ("1 000", 1000),
        ("$29.00", 29),
        ("\\$1,080", 1080),
        ("**73**", 73),
        ("18.", 18),
        (".5", Fraction(1, 2)),
        ("007", 7),
        ("1e5", 100_000),
        ("1.5e-3", Fraction(3, 2000)),
        ("2 \\times 10^{3}", 2000),
        ("13/28", Fraction(13, 28)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\frac34", Fraction(3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("-2\\frac{1}{2}", Fraction(-5, 2)),
        ("25%", 25),
        ("25\\%", 25),
        ("10 weeks", 10),
        ("10\\text{ dollars}", 10),
        ("5 million", 5_000_000),
        ("\\boxed{42}", 42),
        ("12 m^2", 12),
    ],
)
def test_read_number(text: str, value: int | Fraction) -> None:
    assert read_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "five",
        "5 or 6",
        "1, 2, 3",
        "12,34",
        "1,2345",
        "0,111",
        "1_8",
        "1 2",
        "nan",
        "inf",
        "٣",
        "1e999",
        "9" * 201,
        "7 is wrong, 8",
        "1/0",
        "5x",
        "12:30",
        "3 and a half",
        "5k",
        "2-1",
        "10^2",
    ],
)
def test_not_one_number(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("completion", "strict", "lenient", "status"),
    [
        (tagged("48"), True, True, "ok"),
        (tagged("47"), False, False, "ok"),
        (tagged("48") + "<|im_end|> and 47", True, True, "ok"),
        ("<think>48?</think>\n" + tagged("48"), True, True, "ok"),
        (tagged("48") + " done", False, True, "ok"),
        (tagged("48", working=" "), False, True, "ok"),
        ("<SOLUTION>48</SOLUTION>", False, True, "ok"),
        ("It is \\boxed{48}", False, True, "ok"),
        ("So there are 48 of them.", False, True, "ok"),
        (tagged("48 or 47"), False, False, "parse_failure"),
        (tagged("47") + tagged("48"), False, False, "parse_failure"),
        ("<start_working_out>x<end_working_out><SOLUTION>48", False, False, "parse_failure"),
        ("<start_working_out>48", False, False, "parse_failure"),
        ("<think>48", False, False, "parse_failure"),
        ("no idea", False, False, "parse_failure"),
    ],
)
def test_tags(completion: str, strict: bool, lenient: bool, status: str) -> None:
    verdict = verify(completion, "48", "tags")
    assert (verdict.strict, verdict.lenient, verdict.status) == (strict, lenient, status)


@pytest.mark.parametrize(
    ("completion", "strict", "lenient", "status"),
    [
        ("24 + 24 = 48\n#### 48", True, True, "ok"),
        ("24 + 24 = 48\n#### $48.00\n", True, True, "ok"),
        ("#### 48", False, True, "ok"),
        ("#### 10\nAgain.\n#### 48", False, True, "ok"),
        ("#### 48\nAgain.\n#### 10", False, False, "ok"),
        ("sum\n#### 48\nThat is all.", False, True, "ok"),
        ("#### Step 1\nso 48", False, True, "ok"),
        ("so\n#### 48 or 49", False, False, "parse_failure"),
    ],
)
def test_hash(completion: str, strict: bool, lenient: bool, status: str) -> None:
    verdict = verify(completion, "48", "hash")
    assert (verdict.strict, verdict.lenient, verdict.status) == (strict, lenient, status)


@pytest.mark.parametrize(
    ("completion", "gold", "right"),
    [
        ("She sold 72 clips, in total, over both months.", "72", True),
        ("5 - 3 = 2", "2", True),
        ("10-3", "-3", False),
        ("it is -3", "-3", True),
        ("it costs -$5", "-5", True),
        ("the answer is 1e5", "1", False),
        ("the answer is 9^9", "9", False),
        ("the box is B12", "12", False),
        ("4000千克", "4000", True),
        ("#### 42\nAll 3 checks pass.", "42", True),
    ],
)
def test_plain(completion: str, gold: str, right: bool) -> None:
    verdict = verify(completion, gold, Style.PLAIN)
    assert verdict.lenient is right
    assert verdict.strict is right


def test_prefilled_tag_counts() -> None:
    rest = "24 + 24<end_working_out><SOLUTION>48</SOLUTION>"
    assert not verify(rest, "48", "tags").strict
    assert verify(rest, "48", "tags", prefilled="<start_working_out>").strict


@pytest.mark.parametrize("style", list(Style))
@pytest.mark.parametrize("gold", ["", "  "])
def test_empty_gold_is_never_right(style: Style, gold: str) -> None:
    verdict = verify("\\boxed{} ####  <SOLUTION></SOLUTION>", gold, style)
    assert verdict.status is Status.GOLD_UNPARSEABLE
    assert not verdict.lenient


def test_batch_keeps_order_and_styles() -> None:
    verdicts = verify_batch(
        ["a\n#### 1", tagged("2"), "\\boxed{3}", "4"],
        ["1", "2", "3", "5"],
        ["hash", "tags", "boxed", "plain"],
    )
    assert [verdict.lenient for verdict in verdicts] == [True, True, True, False]
    assert verdicts[3] == Verdict(Status.OK, "4", False, False, "4 is not 5")


def test_unknown_style_is_a_user_error() -> None:
    with pytest.raises(UserError, match="tags, hash, boxed, plain"):
        verify("1", "1", "tagz")


def test_status_rates_name_every_status() -> None:
    rates = status_rates(["ok", "ok", "timeout", "parse_failure"])
    assert rates["ok"] == 0.5
    assert rates["timeout"] == 0.25
    assert rates["error"] == 0.0
    assert set(rates) == {status.value for status in Status}


def test_import_loads_no_engine() -> None:
    code = "import sys, ratchet.verifier; print({'sympy', 'math_verify'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
