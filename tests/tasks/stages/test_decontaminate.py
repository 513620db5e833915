"""Which training questions count as giving away a held-out one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.config.run import DecontaminateConfig, QuestionsConfig, SourceConfig
from ratchet.errors import UserError
from ratchet.questions.decontaminate import (
    Text,
    given_away,
    identical,
    normalise,
    overlapping,
    same_draw,
    words_of,
)
from ratchet.questions.load import load_source
from ratchet.store.schemas import read_table
from tasks.stages import decontaminate as stage
from tests.support.made_up import Rows, artifact, context, question


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


def test_the_first_rule_that_applies_is_named() -> None:
    shared = "a b c d e"
    train = [Text(t, False) for t in (f"x {shared}", "What IS x + 1?", "a b c d only")]
    heldout = [Text(t, False) for t in (f"{shared} z", "what is x + 1?", f"w {shared} z")]
    found = given_away(train, heldout, 5)
    assert {at: (o.rule, o.heldout, o.shared) for at, o in found.items()} == {
        0: ("shared words", 0, shared),
        1: ("identical", 1, "what is x + 1?"),
    }
    assert list(given_away(train, heldout, 0)) == [1]


def test_symbolic_pairs_are_compared_by_numbers() -> None:
    frame = "{} has 5 pens and gives 2 of them away. How many pens are left then?"
    same, other = frame.format("Ann"), frame.format("Ann").replace("5", "9")
    train = [Text(same, True), Text(other, True)]
    found = given_away(train, [Text(frame.format("Bob"), True)], 5)
    assert {at: o.rule for at, o in found.items()} == {0: "same draw"}
    # against a question from elsewhere, a shared run counts for symbolic questions too
    found = given_away(train, [Text(frame.format("Bob"), False)], 5)
    assert {at: o.rule for at, o in found.items()} == {0: "shared words", 1: "shared words"}


CONFIG = QuestionsConfig.model_validate(
    {"train": [{"kind": "symbolic", "name": "drawn"}], "test": [{"kind": "file", "path": "t"}]}
)
SUMMARY = {"questions": dict.fromkeys(("train", "warmup", "dev", "test"), 0)}
SUMMARY |= {"prefilled": ""}


def decontaminated(folder: Path, rows: Rows, words: int) -> tuple[Rows, Rows, str]:
    """(questions that stay, those listed, the page)."""
    folder.mkdir(exist_ok=True)
    asked = artifact(folder / "q", "questions", {"questions": rows}, summary=SUMMARY)
    ctx = context(folder, {"questions": asked})
    done = stage.run(ctx, questions=CONFIG, decontaminate=DecontaminateConfig(words=words))
    kept, listed = (
        read_table(ctx.out_dir / f"{name}.parquet", name).to_pylist()
        for name in ("questions", "contaminated")
    )
    assert done.summary["num_dropped"] == len(listed)
    return kept, listed, done.markdown


def test_the_stage_drops_and_lists_training_questions_only(tmp_path: Path) -> None:
    rows = [
        question("t1", question="x a b c d e", source="one"),
        question("t2", question="fine | as it is", source="one"),
        question("w1", question="A b  c d e z", role="warmup", source="warm"),
        question("d1", question="a b c d e z", role="dev", source="dev"),
        question("w2", question="a b c d only", role="warmup", source="warm"),
    ]
    kept, listed, page = decontaminated(tmp_path / "five", rows, 5)
    assert kept == [rows[1], rows[3], rows[4]]
    assert [(row["question_id"], row["rule"], row["shared"]) for row in listed] == [
        ("t1", "shared words", "a b c d e"),
        ("w1", "identical", "a b c d e z"),
    ]
    assert listed[0]["heldout_id"] == "d1" and listed[0]["heldout_question"] == "a b c d e z"
    assert "2 of 4 training questions dropped" in page
    assert "| one | dev | shared words | 1 |" in page
    with pytest.raises(
        UserError, match=r"questions\.warmup: .* \(identical 1\).*decontaminate\.words"
    ):
        decontaminated(tmp_path / "off", rows[:4], 0)
    kept, listed, page = decontaminated(tmp_path / "none", rows[1:2] + rows[3:4], 5)
    assert len(kept) == 2 and listed == [] and page.startswith("**No training question of 1 gives")


@pytest.mark.needs_shared
def test_what_gsm8k_truly_shares_with_its_own_test(shared: Path, tmp_path: Path) -> None:
    """No question is in both splits. Four pairs share 13 words: three the whole wording but for
    the numbers, one half a sentence of another question. No answer is the same."""
    config = SourceConfig.model_validate({"kind": "gsm8k", "path": str(shared / "data/gsm8k")})
    rows = [
        question(
            item.question_id, question=item.question, role=role, source="gsm8k", gold=item.gold
        )
        for role in ("train", "test")
        for item in load_source(config, role)
    ]
    kept, listed, _ = decontaminated(tmp_path, rows, 13)
    assert len(kept) == 7473 + 1319 - 4
    assert {row["rule"] for row in listed} == {"shared words"}
    assert sorted(row["shared"] for row in listed) == [
        "bought stamps at the post office some of the stamps had a snowflake",
        "miles in 3 hours at the same rate how many additional hours would",
        "miles in 3 hours at the same rate how many additional hours would",
        "the first movie is 1 hour and 30 minutes long while the second",
    ]
    golds = {row["question_id"]: row["gold"] for row in rows}
    pairs = [(golds[row["question_id"]], golds[row["heldout_id"]]) for row in listed]
    assert sorted(pairs) == [("2", "5"), ("2", "5"), ("38", "45"), ("4", "215")]


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
