"""The questions stage on hand-made files: what is kept, what is dropped and why, what stops it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import (
    ModelConfig,
    PromptConfig,
    PromptFormat,
    QuestionsConfig,
    SamplerConfig,
)
from ratchet.errors import UserError
from ratchet.store.schemas import read_table
from tasks.runtime.context import StageContext, StageResult
from tasks.stages import questions
from tests.support import made_up
from tests.support.tiny_model import tiny_tokenizer

CONTEXT = 512
# what tiny_tokenizer's template (one token per role mark) and the format put around a question
AROUND = len("\nAnswer in tags.") + 2


def context(folder: Path, emit: Any = print) -> StageContext:
    """A context whose model is a tokenizer with a stated context length."""
    model = made_up.artifact(folder / "model", "model", {})
    tiny_tokenizer().save_pretrained(folder / "model" / "checkpoint")
    facts = {"path": "checkpoint", "revision": None, "context": CONTEXT}
    (folder / "model" / "model.json").write_text(json.dumps(facts))
    return replace(made_up.context(folder, {"model": model}), emit=emit)


def source(folder: Path, name: str, rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """A source 'file' called `name` with these questions and golds."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"question": q, "gold": g}) + "\n" for q, g in rows))
    return {"kind": "file", "path": str(path), "name": name}


def run(
    ctx: StageContext,
    roles: dict[str, list[dict[str, Any]]],
    *,
    max_prompt_tokens: int = 200,
    max_completion_tokens: int = 64,
    **questions_settings: Any,
) -> StageResult:
    config = {**roles, "max_prompt_tokens": max_prompt_tokens, **questions_settings}
    return questions.run(
        ctx,
        questions=QuestionsConfig.model_validate(config),
        prompt=PromptConfig(format=PromptFormat.TAGS_SHORT),
        model=ModelConfig(),
        sampler=SamplerConfig(max_completion_tokens=max_completion_tokens),
    )


def test_what_is_kept_and_what_is_dropped(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    ctx = context(tmp_path, events.append)
    long = "x" * (200 - AROUND + 1)
    train = [
        ("What is 1 + 1?", 2),
        ("what is  1 + 1?", 2),
        ("What is 2 + 2?", 4),
        ("Prove that.", "by induction"),
        (long, 1),
    ]
    roles = {
        "train": [source(tmp_path, "sums", train)],
        "warmup": [source(tmp_path, "warm", [("What is 1 + 1?", 2), ("What is 5 + 5?", "10")])],
        "test": [
            source(tmp_path, "one", [("What is 2 + 2?", 4)]),
            source(tmp_path, "two", [("zero one two three four five", 5)]),
        ],
    }
    result = run(ctx, roles)

    table = read_table(ctx.out_dir / "questions.parquet", "questions").to_pylist()
    assert [(row["role"], row["source"], row["question"], row["gold"]) for row in table] == [
        ("train", "sums", "What is 1 + 1?", "2"),
        ("train", "sums", "What is 2 + 2?", "4"),
        ("warmup", "warm", "What is 5 + 5?", "10"),
        ("test", "one", "What is 2 + 2?", "4"),
        ("test", "two", "zero one two three four five", "5"),
    ]
    assert table[0]["num_prompt_tokens"] == len("What is 1 + 1?") + AROUND
    dropped = [json.loads(line) for line in (ctx.out_dir / "dropped.jsonl").open()]
    assert {(row["role"], row["question"], row["reason"]) for row in dropped} == {
        ("train", "what is  1 + 1?", "duplicate"),
        ("train", "Prove that.", "gold_unparseable"),
        ("train", long, "prompt_too_long"),
        ("warmup", "What is 1 + 1?", "duplicate"),
    }
    assert result.summary["questions"] == {"train": 2, "warmup": 1, "dev": 0, "test": 2}
    assert result.summary["loaded"] == {"train": 5, "warmup": 2, "dev": 0, "test": 2}
    assert result.summary["dropped"]["warmup"] == {"duplicate": 1}
    assert result.summary["longest_prompt_tokens"] == len("zero one two three four five") + AROUND
    assert result.summary["prefilled"] == ""
    assert "| train | sums | 2 | gold_unparseable 1, " in result.markdown
    assert "What is 1 + 1?\nAnswer in tags." in result.markdown
    assert {event["done"] for event in events if event["event"] == "progress"} == {9, 8}


def test_equal_rows_of_two_sources_are_kept_once(tmp_path: Path) -> None:
    """Two sources under one label give equal questions; ids in the table stay unique."""
    ctx = context(tmp_path)
    one = source(tmp_path, "one", [("What is 1 + 1?", 2)])
    run(ctx, {"train": [one, one], "test": [source(tmp_path, "t", [("What is 3 + 3?", 6)])]})
    table = read_table(ctx.out_dir / "questions.parquet", "questions")
    assert table.column("role").to_pylist() == ["train", "test"]


def test_limits_beyond_the_context(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"200 .* 313 = 513 tokens exceed the model's context of 512"
    ):
        roles = {
            role: [source(tmp_path, role, [("What is 1 + 1?", 2)])] for role in ("train", "test")
        }
        run(context(tmp_path), roles, max_completion_tokens=313)


def test_role_emptied_by_long_prompts(tmp_path: Path) -> None:
    roles = {
        "train": [source(tmp_path, "a", [("What is 1 + 1?", 2)])],
        "test": [source(tmp_path, "b", [("y" * 300, 2), ("z" * 400, 2)])],
    }
    expected = (
        rf"questions\.test \(prompt_too_long 2\): the longest prompt has {400 + AROUND} tokens"
    )
    with pytest.raises(UserError, match=expected):
        run(context(tmp_path), roles)


@pytest.mark.parametrize(
    ("role", "row", "expected"),
    [
        ("warmup", ("What is 1 + 1?", 2), r"questions\.warmup \(duplicate 1\): .*different slices"),
        ("dev", ("What is love?", "pain"), r"\(gold_unparseable 1\): check the gold column"),
    ],
)
def test_role_emptied_otherwise(
    tmp_path: Path, role: str, row: tuple[str, Any], expected: str
) -> None:
    roles = {
        "train": [source(tmp_path, "a", [("What is 1 + 1?", 2)])],
        "test": [source(tmp_path, "b", [("What is 3 + 3?", 6)])],
        role: [source(tmp_path, "c", [row])],
    }
    with pytest.raises(UserError, match=expected):
        run(context(tmp_path), roles)


@pytest.mark.needs_shared
def test_gsm8k_through_the_stage(tmp_path: Path, shared: Path) -> None:
    """The golds of 1,000 training and all test questions are accepted."""
    ctx = context(tmp_path)
    folder = str(shared / "data" / "gsm8k")
    roles: dict[str, list[dict[str, Any]]] = {
        "train": [{"kind": "gsm8k", "path": folder, "limit": 1000}],
        "test": [{"kind": "gsm8k", "path": folder}],
    }
    result = run(ctx, roles, max_prompt_tokens=440)
    dropped = result.summary["dropped"]
    assert "gold_unparseable" not in dropped["train"] | dropped["test"]
    assert result.summary["loaded"]["test"] == 1319
