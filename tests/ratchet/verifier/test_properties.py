"""Properties of the verifier over generated input (hypothesis)."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ratchet.verifier import Status, Style, Verdict, verify
from ratchet.verifier.answers.latex import clean
from ratchet.verifier.answers.numbers import number_tokens, read_number, values_in
from ratchet.verifier.extract import TAGS
from ratchet.verifier.verify import boxed_verdict, first_look

SLOW_SECONDS = 1.0

PIECES = st.sampled_from(
    [
        *TAGS,
        *r"""<think> </think> #### \boxed{ \boxed \fbox{ { } \{ \} ( ) [ ] \frac \sqrt \text{ \left(
        \right] ^ _ ^{ ! \infty \pi \begin{pmatrix} \end{pmatrix} & \\ = < > , ; \text{or} % \%
        $ \$ ** * / + - − – . : 1 23 456 7,890 0.5 1e5 x y e i AB yes \, \! \circ ° ² ½ \dots '
        <|im_end|> </s> ٣ | ~ \sin \log_ \sum \int \binom __ cm dollars \mathbb{R} \setminus
        \approx \ne""".split(),  # noqa: SIM905
        *[
            "\\pm ",
            "\\cup ",
            "\\in ",
            "\\le ",
            " or ",
            " and ",
            " ",
            "\n",
            "\x00",
            "\ud800",
            "\u202e",
        ],
    ]
)
SOUP = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)
WITH_LONG_RUNS = st.builds(
    lambda piece, n, rest: piece * n + rest, PIECES, st.integers(1, 3000), SOUP
)


def consistent(verdict: Verdict) -> None:
    assert not (verdict.strict and not verdict.lenient)
    assert not (verdict.lenient and verdict.status is not Status.OK)
    assert (verdict.extracted is not None) or verdict.status is not Status.OK


@given(completion=SOUP | WITH_LONG_RUNS, gold=SOUP, style=st.sampled_from(list(Style)))
@example(completion="\\boxed{" * 20_000, gold="1", style=Style.BOXED)
@example(completion="1," * 50_000, gold="1", style=Style.PLAIN)
@example(completion="#" * 100_000, gold="1", style=Style.HASH)
@settings(max_examples=400, deadline=None)
def test_no_text_raises_or_is_slow(completion: str, gold: str, style: Style) -> None:
    start = time.process_time()
    look = first_look(completion, gold, style, "")
    assert time.process_time() - start < SLOW_SECONDS
    if isinstance(look, Verdict):
        consistent(look)


@given(content=SOUP)
@settings(max_examples=300, deadline=None)
def test_a_box_of_the_gold_is_right_or_unreadable(content: str) -> None:
    verdict = boxed_verdict("\\boxed{" + content + "}", content)
    if isinstance(verdict, Verdict) and verdict.status is Status.OK:
        assert verdict.lenient, (content, verdict)


@given(text=SOUP)
@settings(max_examples=300, deadline=None)
def test_cleaning_is_stable(text: str) -> None:
    once = clean(text)
    assert clean(clean(once)) == clean(once)


decimals = st.decimals(
    min_value=Decimal(-10) ** 12, max_value=Decimal(10) ** 12, places=4, allow_nan=False
)


def renderings(value: Decimal) -> list[str]:
    """The documented ways to write a number."""
    plain = f"{value:f}"
    grouped = f"{value:,f}"
    sign, digits = ("-", plain[1:]) if plain.startswith("-") else ("", plain)
    return [
        plain,
        grouped,
        grouped.replace(",", "{,}"),
        f"{sign}${digits}",
        f"\\${plain}" if not sign else f"-\\${digits}",
        f"**{plain}**",
        f" {plain} ",
        f"{plain} dollars",
        f"{plain}\\text{{ cm}}",
        f"−{digits}" if sign else f"+{digits}",
        f"{value:e}".replace("+", ""),
        f"\\boxed{{{plain}}}",
        f"{plain}0",
        f"{plain}%",
    ]


@given(value=decimals)
def test_every_rendering_of_a_decimal_is_that_number(value: Decimal) -> None:
    for text in renderings(value):
        assert read_number(text) == Fraction(value), text


@given(value=decimals, other=decimals)
def test_another_number_is_never_accepted(value: Decimal, other: Decimal) -> None:
    gold = f"{value:f}"
    for text in renderings(other):
        for style, shape in (
            (Style.TAGS, "<start_working_out>w<end_working_out><SOLUTION>{}</SOLUTION>"),
            (Style.HASH, "w\n#### {}"),
            (Style.BOXED, "\\boxed{{{}}}"),
        ):
            verdict = verify(shape.format(text), gold, style)
            assert verdict.lenient == (value == other), (text, gold, style, verdict)


@given(top=st.integers(-999, 999), bottom=st.integers(1, 999), factor=st.integers(1, 9))
def test_fractions(top: int, bottom: int, factor: int) -> None:
    value = Fraction(top, bottom)
    sign = "-" if top < 0 else ""
    for text in (
        f"{top * factor}/{bottom * factor}",
        f"\\frac{{{top * factor}}}{{{bottom * factor}}}",
        f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}",
    ):
        assert read_number(text) == value
        assert verify(f"\\boxed{{{text}}}", str(value), "boxed").lenient
        assert not verify(f"\\boxed{{{text}}}", str(value + 1), "boxed").lenient


@given(whole=st.integers(1, 99), top=st.integers(1, 98), bottom=st.integers(2, 99))
def test_mixed_numbers(whole: int, top: int, bottom: int) -> None:
    if top >= bottom:
        return
    value = whole + Fraction(top, bottom)
    for text in (f"{whole} {top}/{bottom}", f"{whole}\\frac{{{top}}}{{{bottom}}}"):
        assert read_number(text) == value
        assert verify(f"\\boxed{{{text}}}", str(value), "boxed").lenient


@given(
    value=st.integers(-(10**9), 10**9),
    spaces=st.lists(st.sampled_from([" ", "\n", "\t", "  "]), min_size=4, max_size=4),
)
def test_white_space_changes_no_verdict(value: int, spaces: list[str]) -> None:
    a, b, c, d = spaces
    texts = {
        Style.TAGS: f"{a}<start_working_out>{b}w<end_working_out>{c}"
        f"<SOLUTION>{d}{value}{a}</SOLUTION>",
        Style.HASH: f"w{a}\n####{' ' * len(b)}{value}{c}",
        Style.BOXED: f"{a}\\boxed{{{b}{value}{c}}}{d}",
    }
    for style, text in texts.items():
        assert verify(text, str(value), style).strict, (style, text)
        assert not verify(text, str(value + 1), style).lenient


@given(words=st.lists(st.sampled_from(["so", "x", "=", "and", "is", "3.5", "-4", "1,000", "10%"])))
def test_tokens_are_where_they_are_said_to_be(words: list[str]) -> None:
    text = " ".join(words)
    for end, token in number_tokens(text):
        assert text[:end].endswith(token.lstrip("-"))
    expected = {"3.5": Fraction(7, 2), "1,000": 1000, "10%": 10}
    for word, value in expected.items():
        assert (word in words) == (value in values_in(text))


@pytest.mark.slow
@given(completion=SOUP, gold=SOUP)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_boxed_soup_through_the_engine(completion: str, gold: str) -> None:
    start = time.monotonic()
    verdict = verify(f"\\boxed{{{completion}}}", gold, "boxed", deadline_seconds=2)
    assert time.monotonic() - start < 30  # 2 + 0.5 on an idle machine; test_verifier_pool times it
    consistent(verdict)
