"""Where answers stand."""

from __future__ import annotations

import pytest

from ratchet.verifier import Style
from ratchet.verifier.answer_places import Place, elsewhere, places

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
        ("<think>#### 3</think>\nSo \\boxed{2}.", {Place.BOXED}),
        ("<think>Perhaps \\boxed{2}, or", {Place.THOUGHT}),
        ("So \\boxed{2}.<|im_end|>\n#### 3", {Place.BOXED}),
    ],
)
def test_places(text: str, found: set[Place]) -> None:
    assert places(text) == found


def test_elsewhere_leaves_out_answers_in_the_demanded_place() -> None:
    texts = [TAGGED, "\\boxed{2}", "\\boxed{3}", "#### 4"]
    assert elsewhere(texts, Style.TAGS) == {"boxed": 0.5, "hash": 0.25}
    assert elsewhere(texts, Style.BOXED) == {"tags": 0.25, "hash": 0.25}
    assert elsewhere([TAGGED], Style.TAGS) == {}
