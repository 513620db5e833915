"""What a user is told about files, columns, splits and hub ids that don't work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.config.run import SourceConfig
from ratchet.errors import UserError
from ratchet.questions.files import read_hub
from ratchet.questions.load import fingerprint, load_source

GOOD = '{"question": "What is 1 + 1?", "gold": "2"}\n'


def error_of(kind: str, path: Path | str | None, **settings: object) -> str:
    """The message, checked to be one line."""
    config = SourceConfig.model_validate(
        {"kind": kind, "path": None if path is None else str(path), **settings}
    )
    with pytest.raises(UserError) as caught:
        load_source(config, "train", 2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_missing_file_names_the_absolute_path_and_a_near_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "questions.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    message = error_of("file", "question.jsonl")
    assert str(tmp_path / "question.jsonl") in message
    assert f"did you mean {tmp_path / 'questions.jsonl'}?" in message
    with pytest.raises(UserError, match=r"no file or folder .*question\.jsonl"):
        fingerprint(SourceConfig.model_validate({"kind": "file", "path": "question.jsonl"}))
    # data/q.jsonl looks like owner/name, but the ending says it is a file
    assert str(tmp_path / "data" / "q.jsonl") in error_of("gsm8k", "data/q.jsonl")


def test_missing_split_lists_those_found(tmp_path: Path) -> None:
    written(tmp_path / "test.jsonl", GOOD)
    written(tmp_path / "extra-00000-of-00001.parquet", b"")
    message = error_of("file", tmp_path)
    assert "no split 'train'" in message
    assert "extra, test" in message
    assert "no split 'dev'" in error_of("file", tmp_path, split="dev")
    assert "not the split 'train'" in error_of("file", tmp_path / "test.jsonl", split="train")


def test_two_files_for_one_split(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", GOOD)
    written(tmp_path / "train.json", GOOD)
    assert "train.jsonl and train.json" in error_of("file", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", GOOD + "\n" + '{"question": "x", "gold"', "a.jsonl:3 is not valid JSON"),
        ("a.jsonl", GOOD + "[1]\n", "a.jsonl:2 is not a JSON object"),
        ("a.jsonl", GOOD + '{"question": 7, "gold": "2"}', "a.jsonl:2: 'question' holds no"),
        ("a.jsonl", GOOD + '{"question": "x", "gold": [2]}', "a.jsonl:2: 'gold' holds no answer"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        ("a.jsonl", "", "holds no rows"),
        ("a.json", '[\n{"question": "x"},\n{]', "a.json:3 is not valid JSON"),
        ("a.json", "[]", "holds no rows"),
        ("a.csv", "question,gold\nx,1\ny\n", "a.csv:3 has not as many fields"),
        ("a.csv", 'question,gold\n"x,1\n', "is not valid CSV"),
        ("a.parquet", "no parquet", "is not a readable Parquet file"),
        ("a.txt", GOOD, "is no table: its name must end in .jsonl"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    file = written(tmp_path / name, content)
    message = error_of("file", file)
    assert expected in message
    assert str(file) in message


def test_missing_columns_of_an_own_file(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", '{"problem": "x", "final_answer": "1"}\n')
    message = error_of("file", file)
    assert "no column 'question': it has problem, final_answer" in message
    assert message.endswith("--set questions.train.2.columns.question=problem")
    message = error_of("file", file, columns={"question": "problem"})
    assert message.endswith("--set questions.train.2.columns.gold=final_answer")
    # a mapped column that is not there: the nearest name by spelling
    message = error_of("file", file, columns={"question": "problm", "gold": "final_answer"})
    assert "no column 'problm'" in message
    assert message.endswith("columns.question=problem")
    message = error_of("file", file, columns={"question": "problem", "answer": "final_answer"})
    assert "'answer' is none of them" in message


def test_missing_columns_of_a_known_kind(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", GOOD)
    message = error_of("gsm8k", file)
    assert "no column 'answer': it has question, gold" in message
    assert "kind 'file'" in message
    message = error_of("deepmath", file)
    assert "'final_answer' or 'solution'" in message
    message = error_of("gsm8k", file, columns={"gold": "answer"})
    assert "columns are for kind 'file'" in message


def test_row_without_a_column_that_others_have(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", GOOD + '{"gold": "2"}\n')
    assert "a.jsonl:2: 'question'" in error_of("file", file)


def test_empty_selection(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", GOOD)
    message = error_of("file", file, offset=1)
    assert "questions.train.2 (file) selects nothing" in message
    assert "all 1 questions" in message


def test_own_file_without_a_path() -> None:
    assert "needs path" in error_of("file", None)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = error_of("file", "nobody/nothing-of-this-name")
    assert "'nobody/nothing-of-this-name' could not be fetched from the hub" in message
    assert "local file or folder" in message


def test_hub_reader_on_a_local_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repo").mkdir()
    written(tmp_path / "repo" / "train.jsonl", '{"question": "x", "answer": "#### 1", "more": 2}\n')
    repo = str(tmp_path / "repo")
    table = read_hub(repo, None, "train", None, {"question", "answer"})
    assert table.rows == [{"question": "x", "answer": "#### 1"}]
    assert table.columns == ["question", "answer", "more"]
    with pytest.raises(UserError, match=r"Unknown split .*'train'"):
        read_hub(repo, None, "test", None, set())


def jsonl(path: Path) -> Path:
    return written(path.with_suffix(".jsonl"), "\ufeff" + GOOD + "\n\n")


def json_list(path: Path) -> Path:
    return written(path.with_suffix(".json"), f"[{GOOD}]")


def json_lines_called_json(path: Path) -> Path:
    return written(path.with_suffix(".json"), GOOD)


def comma_separated(path: Path) -> Path:
    return written(path.with_suffix(".csv"), "gold,question\r\n2,What is 1 + 1?\r\n")


def parquet(path: Path) -> Path:
    table = pa.table({"gold": [2.0], "question": ["What is 1 + 1?"], "unused": [b"x"]})
    pq.write_table(table, path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


@pytest.mark.parametrize(
    "write", [jsonl, json_list, json_lines_called_json, comma_separated, parquet]
)
def test_every_file_type(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    write(tmp_path / "train")
    config = SourceConfig.model_validate({"kind": "file", "path": str(tmp_path)})
    questions = load_source(config, "train")
    assert [(q.question, q.gold, q.split) for q in questions] == [("What is 1 + 1?", "2", "train")]


def test_parquet_shards_of_a_split(tmp_path: Path) -> None:
    for shard, gold in enumerate(["5", "6"]):
        table = pa.table({"question": [f"q{shard}"], "gold": [gold]})
        pq.write_table(table, tmp_path / f"train-0000{shard}-of-00002.parquet")
    config = SourceConfig.model_validate({"kind": "file", "path": str(tmp_path)})
    assert [q.gold for q in load_source(config, "train")] == ["5", "6"]
