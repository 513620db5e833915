"""Where answers stand, and what the benchmark says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.answer_places import Place, elsewhere, places
from ratchet.config import PromptFormat
from ratchet.verifier import Style
from tasks.benchmark import sentences

TAGGED = "<start_working_out>\n1+1=2\n<end_working_out>\n<SOLUTION>2</SOLUTION>"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TAGGED, {Place.TAGS}),
        ("So 1+1=2\n#### 2", {Place.HASH}),
        ("So \\boxed{2}.", {Place.BOXED}),
        ("<SOLUTION>\\boxed{2}</SOLUTION>", {Place.TAGS, Place.BOXED}),
        ("The answer is 2.", {Place.NUMBER}),
        ("I don't know.", {Place.NONE}),
        ("", {Place.NONE}),
        ("#### Heading of a section", {Place.NONE}),
    ],
)
def test_places(text: str, found: set[Place]) -> None:
    assert places(text) == found


def test_elsewhere_leaves_out_answers_in_the_demanded_place() -> None:
    texts = [TAGGED, "\\boxed{2}", "\\boxed{3}", "#### 4"]
    assert elsewhere(texts, Style.TAGS) == {"boxed": 0.5, "hash": 0.25}
    assert elsewhere(texts, Style.BOXED) == {"tags": 0.25, "hash": 0.25}
    assert elsewhere([TAGGED], Style.TAGS) == {}


def row(name: str, strict: float, lenient: float, places: dict[str, float]) -> dict[str, Any]:
    return {
        "prompt_format": name,
        "strict": strict,
        "strict_low": strict - 0.05,
        "strict_high": strict + 0.05,
        "lenient": lenient,
        "answers_elsewhere": json.dumps(places),
    }


def test_a_format_that_fails_is_told_from_maths_that_fails() -> None:
    rows = [
        row("tags", 0.04, 0.80, {"boxed": 0.97}),
        row("tags_example", 0.76, 0.77, {"boxed": 0.01}),
        row("boxed", 0.30, 0.30, {}),
    ]
    tags, example, boxed, advice = sentences(rows, PromptFormat.TAGS)
    assert tags == (
        "tags: 4.0% right in the demanded format, 80.0% right anywhere: the format, not the "
        "maths, costs 76 points; instead of the demanded place, answers stood 97% in \\boxed{}."
    )
    assert example.endswith("77.0% right anywhere; the answers stand where they should.")
    assert "costs" not in boxed
    assert advice == (
        "tags_example gets 76.0% strictly right, the run's tags 4.0%: consider prompt.format = "
        "'tags_example'."
    )
    assert len(sentences(rows, PromptFormat.TAGS_EXAMPLE)) == 3
    close = [row("tags", 0.30, 0.30, {}), row("boxed", 0.38, 0.38, {})]
    assert len(sentences(close, PromptFormat.TAGS)) == 2, "intervals overlap: no advice"
    assert sentences(rows, PromptFormat.HASH_SHORT)[-1].endswith("hash_short, was not measured.")
