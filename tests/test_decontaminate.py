"""Which training questions count as giving away a held-out one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.config import SourceConfig
from ratchet.questions.decontaminate import (
    identical,
    normalise,
    overlapping,
    same_draw,
    words_of,
)
from ratchet.questions.load import load_source


def test_words() -> None:
    assert words_of("Ann's 1,250 x’s; 2.5 of them.\n\\frac{1}{2} ﬁne") == [
        "anns", "1250", "xs", "2.5", "of", "them", "frac", "1", "2", "fine",
    ]  # fmt: skip
    assert words_of("(1,2,3) and 12,34") == ["1", "2", "3", "and", "12", "34"]


def test_identical_keeps_signs_apart() -> None:
    assert normalise("  What IS\n it? ") == "what is it?"
    train = ["What is x + 1?", "what  is X - 1?", "unrelated"]
    assert identical(train, ["other", "WHAT IS x - 1?"]) == {1: 1}


def test_shared_run_of_exactly_so_many_words() -> None:
    heldout = ["nothing here", "One two, three four five six!"]
    train = ["zero two three four; FIVE seven", "two three four", "three four five six seven"]
    assert overlapping(train, heldout, 4) == {
        0: (1, "two three four five"),
        2: (1, "three four five six"),
    }
    assert overlapping(train, heldout, 5) == {}


def test_short_questions_count_only_when_identical() -> None:
    heldout = ["two three", "one two three four"]
    assert overlapping(["Two  three", "two three!"], heldout, 4) == {0: (0, "two three")}


def test_numbers_count_as_words() -> None:
    heldout = ["he had 5 red pens and 3 blue pens"]
    assert overlapping(["he had 6 red pens and 3 blue ones"], heldout, 6) == {}
    assert overlapping(["she had 5 red pens and 3 green pens"], heldout, 6) == {
        0: (0, "had 5 red pens and 3")
    }


def test_same_draw_ignores_names_only() -> None:
    heldout = ["Ann has 5 pens. Bob gives Ann 3 more. How many pens does Ann have?"]
    train = [
        "Kim has 5 pens. Leo gives Kim 3 more. How many pens does Kim have?",
        "Ann has 5 pens. Bob gives Ann 4 more. How many pens does Ann have?",
        "Ann has 3 pens. Bob gives Ann 5 more. How many pens does Ann have?",
        "Ann has 5 cups. Bob gives Ann 3 more. How many cups does Ann have?",
    ]
    assert same_draw(train, heldout) == {0: 0}


@pytest.mark.needs_shared
def test_gsm8k_shares_four_questions_at_thirteen_words(shared: Path) -> None:
    config = SourceConfig.model_validate({"kind": "gsm8k", "path": str(shared / "data/gsm8k")})
    train = [question.question for question in load_source(config, "train")]
    test = [question.question for question in load_source(config, "test")]
    found = overlapping(train, test, 13)
    assert identical(train, test) == {}
    assert sorted(run for _, run in found.values()) == [
        "bought stamps at the post office some of the stamps had a snowflake",
        "miles in 3 hours at the same rate how many additional hours would",
        "miles in 3 hours at the same rate how many additional hours would",
        "the first movie is 1 hour and 30 minutes long while the second",
    ]


def test_symbolic_training_set_survives() -> None:
    """Draws with another seed lose a few percent at most, draws against held-out templates nothing;
    a copy of the training set loses everything."""

    def drawn(count: int, seed: int, templates: str) -> list[str]:
        settings = {"kind": "symbolic", "count": count, "seed": seed, "templates": templates}
        config = SourceConfig.model_validate(settings)
        return [question.question for question in load_source(config, "train")]

    train = drawn(1000, 1, "seen")
    assert len(same_draw(train, drawn(400, 2, "seen"))) < 50
    assert same_draw(train, drawn(400, 2, "heldout")) == {}
    assert len(same_draw(train, train)) == 1000
