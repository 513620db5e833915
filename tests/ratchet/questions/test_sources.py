"""Sources of questions on the real data sets, and rows worked out by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ratchet.config.run import SourceConfig, SourceKind
from ratchet.errors import UserError
from ratchet.questions import deepmath, gsm8k, math500, svamp
from ratchet.questions.base import BadRowError, plain_number, question_id
from ratchet.questions.load import fingerprint, load, load_source


def source(kind: str, path: Path | str | None = None, **settings: object) -> SourceConfig:
    return SourceConfig.model_validate(
        {"kind": kind, "path": None if path is None else str(path), **settings}
    )


@pytest.mark.needs_shared
def test_gsm8k_golds_and_bands(shared: Path) -> None:
    folder = shared / "data" / "gsm8k"
    train = load_source(source("gsm8k", folder), "train")
    test = load_source(source("gsm8k", folder), "test")
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0].gold == "72"
    assert train[0].band == "2 steps"
    assert train[0].difficulty == 2
    assert train[0].reference_solution is not None
    assert train[0].reference_solution.endswith(
        "<<48+24=72>>72 clips altogether in April and May.\n#### 72"
    )
    # facts about the data set: 79 and 14 golds with thousands commas, 95 without annotations
    for questions, commas in ((train, 79), (test, 14)):
        assert (
            sum("," in (q.reference_solution or "").split("####")[1] for q in questions) == commas
        )
        assert all(str(int(q.gold)) == q.gold for q in questions)
    bands = Counter(question.band for question in train)
    assert bands["unannotated"] == 95
    assert bands["8+ steps"] == 43
    assert bands["1 step"] == 404
    assert {q.split for q in test} == {"test"}


@pytest.mark.needs_shared
def test_svamp_original_file(shared: Path) -> None:
    questions = load_source(source("svamp", shared / "data" / "svamp" / "SVAMP.json"), "train")
    assert len(questions) == 1000
    assert questions[0].question == (
        "Each pack of dvds costs 76 dollars. If there is a discount of 25 dollars on each pack, "
        "how much do you have to pay to buy each pack?"
    )
    assert questions[0].gold == "51"
    assert questions[0].reference_solution == "76 - 25 = <<76-25=51>>51\n#### 51"
    # one equation is a bare number, two contradict their answers
    assert sum(question.reference_solution is None for question in questions) == 3
    assert {question.band for question in questions} == {"all"}


@pytest.mark.needs_shared
def test_svamp_original_file_cut_into_splits(shared: Path) -> None:
    file = shared / "data" / "svamp" / "SVAMP.json"
    whole = [q.question for q in load_source(source("svamp", file), "train")]
    train = [q.question for q in load_source(source("svamp", file, split="train"), "train")]
    test = load_source(source("svamp", file, split="test"), "test")
    assert (len(train), len(test)) == (700, 300)
    assert train + [q.question for q in test] == whole
    assert {q.split for q in test} == {"test"}
    with pytest.raises(UserError, match="no split 'dev': it has train, test"):
        load_source(source("svamp", file, split="dev"), "dev")


@pytest.mark.needs_shared
def test_math500_levels(shared: Path) -> None:
    questions = load_source(source("math500", shared / "data" / "math500"), "test")
    assert Counter(question.band for question in questions) == {
        "level 1": 43,
        "level 2": 90,
        "level 3": 105,
        "level 4": 128,
        "level 5": 134,
    }
    assert questions[1].gold == "p - q"


@pytest.mark.needs_shared
def test_deepmath_sample(shared: Path) -> None:
    file = shared / "data" / "deepmath_sample" / "deepmath_sample16.jsonl"
    questions = load_source(source("deepmath", file), "train")
    assert len(questions) == 16
    # difficulties 4.5, 5.5, 8.0: halves go up
    assert [q.band for q in questions[:3]] == ["difficulty 5", "difficulty 6", "difficulty 8"]


@pytest.mark.needs_shared
def test_own_file_with_mapped_columns(shared: Path) -> None:
    file = shared / "data" / "math_train_rllm" / "math_train.json"
    columns = {"question": "problem", "gold": "answer", "difficulty": "difficulty"}
    loaded = load(source("file", file, columns=columns, name="math"), "train")
    assert len(loaded.questions) + len(loaded.repeats) == 7474
    assert {q.source for q in loaded.questions} == {"math"}
    # two rows of this file have no answer and two an empty one: kept for the gold check to drop
    assert sum(q.gold == "" for q in loaded.questions) == 4


def test_symbolic_source() -> None:
    settings = {"count": 30, "seed": 3, "min_steps": 2, "max_steps": 2}
    questions = load_source(source("symbolic", **settings), "train")
    assert len(questions) == 30
    assert {q.band for q in questions} == {"2 steps"}
    assert {q.split for q in questions} == {"seen"}
    assert all((q.reference_solution or "").endswith(f"#### {q.gold}") for q in questions)
    assert questions == load_source(source("symbolic", **settings), "train")


def test_id_follows_from_the_table_columns() -> None:
    question = load_source(source("symbolic", count=1), "test")[0]
    assert question.question_id == question_id("symbolic", "seen", question.question)
    # sha256 of '["gsm8k", "test", "2 + 2?"]'
    assert question_id("gsm8k", "test", "2 + 2?") == "748d0fb8037230f4"


def test_gsm8k_row() -> None:
    row = {"question": " How much? ", "answer": "He has 2*600=<<2*600=1200>>1200.\n#### 1,200"}
    parsed = gsm8k.parse(row)
    assert (parsed.question, parsed.gold, parsed.band) == ("How much?", "1200", "1 step")
    assert gsm8k.parse({"question": "q", "answer": "down\n#### -5"}).gold == "-5"
    with pytest.raises(BadRowError, match="####"):
        gsm8k.parse({"question": "q", "answer": "just 5"})


def test_svamp_row_of_the_hub_copy() -> None:
    row = {
        "ID": "chal-11",
        "Body": "There are 3 red and 5 blue bags.",
        "Question": "How many pens are in them at 2 each?",
        "Equation": "( ( 3.0 + 5.0 ) * 2.0 )",
        "Answer": "16.0",
        "Type": "Multiplication",
        "question_concat": "anything",
    }
    parsed = svamp.parse(row)
    assert (
        parsed.question == "There are 3 red and 5 blue bags. How many pens are in them at 2 each?"
    )
    assert parsed.gold == "16"
    assert parsed.difficulty == 2
    assert parsed.reference_solution == ("3 + 5 = <<3+5=8>>8\n8 * 2 = <<8*2=16>>16\n#### 16")


@pytest.mark.parametrize(
    ("equation", "steps"),
    [
        ("( 7.0 / 2.0 )", [("7 / 2", "3.5")]),
        ("( 6.0 - ( 3.0 + 2.0 ) )", [("3 + 2", "5"), ("6 - 5", "1")]),
        ("( 3.0 - 5.0 )", [("3 - 5", "-2")]),
        ("8.0", []),
        ("( 1.0 / 3.0 )", None),
        ("( 1.0 / 0.0 )", None),
        ("( 1.0 + 2.0", None),
        ("( 1.0 + 2.0 ) 3.0", None),
        ("", None),
    ],
)
def test_svamp_equation_steps(equation: str, steps: list[tuple[str, str]] | None) -> None:
    assert svamp.equation_steps(equation) == steps


def test_svamp_solution_left_out_where_the_equation_gives_another_answer() -> None:
    row = {"Body": "A.", "Question": "B?", "Equation": "( 1.0 + 1.0 )", "Answer": 3.0}
    assert svamp.parse(row).reference_solution is None


def test_deepmath_layouts_give_the_same_question() -> None:
    ours = {"question": "Find x.", "final_answer": "2\\pi", "difficulty": 6.0}
    hub = {
        "prompt": [{"role": "user", "content": "Find x."}],
        "solution": "$2\\pi$",
        "difficulty": 6.0,
    }
    assert deepmath.parse(ours) == deepmath.parse(hub)
    assert deepmath.parse({"question": "q", "final_answer": "$1$ or $2$"}).gold == "$1$ or $2$"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    with pytest.raises(BadRowError, match="more than one"):
        deepmath.parse({"prompt": chat, "solution": "1"})


def test_math500_level_as_text() -> None:
    row = {"problem": "p", "answer": "1", "level": "Level 4"}
    assert math500.parse(row).band == "level 4"
    with pytest.raises(BadRowError, match="level"):
        math500.parse({"problem": "p", "answer": "1", "level": "hard"})


def test_plain_number() -> None:
    texts = ["145.0", "0.50", "1e3", "-7", "100", "0.0"]
    assert [plain_number(text) for text in texts] == ["145", "0.5", "1000", "-7", "100", "0"]
    for bad in ("nan", "1e99", "seven"):
        with pytest.raises(BadRowError):
            plain_number(bad)


def write_numbers(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"question": "What is {n}?", "gold": {n}}}\n' for n in range(count)))
    return path


def golds(file: Path, **settings: object) -> list[str]:
    return [q.gold for q in load_source(source("file", file, **settings), "train")]


def test_offset_limit_and_shuffle(tmp_path: Path) -> None:
    file = write_numbers(tmp_path / "q.jsonl", 40)
    assert golds(file, offset=2, limit=3) == ["2", "3", "4"]
    assert golds(file, offset=38, limit=10) == ["38", "39"]
    shuffled = golds(file, shuffle_seed=5)
    assert shuffled != golds(file)
    assert sorted(shuffled, key=int) == golds(file)
    assert shuffled != golds(file, shuffle_seed=6)
    # offset and limit cut the shuffled order, so two slices never meet
    first = golds(file, shuffle_seed=5, limit=15)
    rest = golds(file, shuffle_seed=5, offset=15)
    assert first + rest == shuffled


def test_repeats_are_dropped_before_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = ['{"question": "a", "gold": 1}', '{"question": " a ", "gold": 2}']
    file.write_text("\n".join([*lines, '{"question": "b", "gold": 3}']))
    loaded = load(source("file", file, limit=2), "train")
    assert [(q.question, q.gold) for q in loaded.questions] == [("a", "1"), ("b", "3")]
    assert [q.gold for q in loaded.repeats] == ["2"]


def test_fingerprints(tmp_path: Path) -> None:
    assert fingerprint(source("gsm8k")) == "openai/gsm8k@main"
    assert fingerprint(source("math500", revision="abc")) == "HuggingFaceH4/MATH-500@abc"
    assert fingerprint(source("file", "somebody/something")) == "somebody/something@main"

    file = write_numbers(tmp_path / "train.jsonl", 3)
    before = fingerprint(source("file", file))
    other = write_numbers(tmp_path / "other.jsonl", 3)
    assert fingerprint(source("file", other)) != before  # a file's name is its split's
    write_numbers(tmp_path / "test.jsonl", 2)
    folder = fingerprint(source("file", tmp_path))
    split = fingerprint(source("file", tmp_path, split="train"))
    assert split == before
    write_numbers(file, 4)
    assert fingerprint(source("file", file)) != before
    assert fingerprint(source("file", tmp_path)) != folder

    drawn = fingerprint(source("symbolic", count=5))
    assert drawn == fingerprint(source("symbolic", count=5, name="other"))
    assert drawn != fingerprint(source("symbolic", count=6))


def test_every_kind_has_a_reader() -> None:
    from ratchet.questions.load import READERS

    assert set(SourceKind) == {*READERS, SourceKind.FILE, SourceKind.SYMBOLIC}


@pytest.mark.needs_shared
def test_a_folder_with_the_original_svamp_file_has_its_splits(shared: Path) -> None:
    folder = str(shared / "data" / "svamp")
    train = load_source(SourceConfig(kind="svamp", path=folder, split="train"), "train")
    test = load_source(SourceConfig(kind="svamp", path=folder, split="test"), "test")
    assert (len(train), len(test)) == (700, 300)
    with pytest.raises(UserError, match="has no split 'dev'"):
        load_source(SourceConfig(kind="svamp", path=folder, split="dev"), "dev")
