"""The score stage with the real verifier and rewards on hand-made completions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import PromptConfig, PromptFormat, RewardsConfig
from ratchet.errors import UserError
from ratchet.prompts import OPENING_TAG
from ratchet.store.schemas import read_table
from ratchet.verifier import Style
from tasks.stages import score as stage
from tests.support.made_up import artifact, context, question

PERFECT = "<start_working_out>\n2 + 2 = 4\n<end_working_out>\n<SOLUTION>4</SOLUTION>"
WRONG = PERFECT.replace("<SOLUTION>4", "<SOLUTION>5")
TEXTS = [PERFECT, WRONG, "The answer is 4", "no idea"]
TAGS = PromptConfig(format=PromptFormat.TAGS)


def completion(text: str, index: int, **fields: Any) -> dict[str, Any]:
    return {
        "question_id": "q",
        "sample_index": index,
        "prompt_format": "tags",
        "text": text,
        "token_ids": [1, 2],
        "num_tokens": 2,
        "finish_reason": "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 64,
        "seed": 0,
        "model_key": "m",
    } | fields


def run(
    tmp_path: Path,
    completions: list[dict[str, Any]],
    weights: dict[str, float] | None = None,
    prefilled: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    inputs = {
        "completions": artifact(tmp_path / "c", "presample", {"completions": completions}),
        "questions": artifact(
            tmp_path / "q",
            "questions",
            {"questions": [question("q"), question("held", role="test")]},
            summary={"prefilled": OPENING_TAG if prefilled else ""},
        ),
    }
    ctx = context(tmp_path, inputs)
    result = stage.run(ctx, prompt=TAGS, rewards=RewardsConfig(weights=weights or {}))
    return read_table(ctx.out_dir / "scores.parquet", "scores").to_pylist(), result.summary


def test_every_completion_gets_its_verdict_and_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "BATCH_ROWS", 3)  # two batches
    rows, summary = run(
        tmp_path,
        [
            completion(text, index, finish_reason="length" if index == 3 else "stop")
            for index, text in enumerate(TEXTS)
        ],
    )
    assert [row["sample_index"] for row in rows] == [0, 1, 2, 3]
    assert [row["strict"] for row in rows] == [True, False, False, False]
    assert [row["lenient"] for row in rows] == [True, False, True, False]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "parse_failure"]
    assert [row["truncated"] for row in rows] == [False, False, False, True]
    # the only annotated step is the answer itself, so there is no step to reach
    assert [row["reward_step_check"] for row in rows] == [None] * 4
    assert [row["reward_exact_check"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert [row["reward_tag_check"] for row in rows] == [0.5, 0.5, 0.0, 0.0]

    assert summary["strict"] == 0.25
    assert summary["lenient"] == 0.5
    assert summary["truncated_share"] == 0.25
    assert summary["status_rates"]["ok"] == 0.75
    assert summary["status_rates"]["parse_failure"] == 0.25
    assert sum(summary["status_rates"].values()) == pytest.approx(1.0)
    assert summary["reward_means"]["format_check"] == 0.5
    assert summary["reward_means"]["step_check"] is None
    # exact 2 + correct 1 + lenient 0.5 + format 0.5 + tags 0.5 + bare number 0.25 = 4.75 for the
    # perfect one; format, tags, bare number and a right number in the working = 1.75 for the wrong
    # one; a right number anywhere = 0.5 for the third
    assert summary["total_reward_mean"] == pytest.approx((4.75 + 1.75 + 0.5) / 4)


def test_configured_weights_choose_the_rewards(tmp_path: Path) -> None:
    rows, summary = run(tmp_path, [completion(PERFECT, 0)], {"format_check": 3.0})
    assert [name for name in rows[0] if name.startswith("reward_")] == ["reward_format_check"]
    assert summary["total_reward_mean"] == 3.0


def test_an_opening_tag_written_by_the_template_counts_as_written(tmp_path: Path) -> None:
    text = PERFECT.removeprefix("<start_working_out>")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert not run(tmp_path / "a", [completion(text, 0)])[0][0]["strict"]
    row = run(tmp_path / "b", [completion(text, 0)], prefilled=True)[0][0]
    assert row["strict"]
    assert row["reward_tag_check"] == 0.5


def not_a_number(completions: list[str], **columns: Any) -> list[float]:
    return [float("nan")] * len(completions)


def test_several_processes_write_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [completion(TEXTS[index % 4], index) for index in range(23)]
    monkeypatch.setattr(stage, "BATCH_ROWS", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
    alone = run(tmp_path / "a", rows)
    monkeypatch.setattr(stage, "num_processes", lambda total, style: 2)
    assert run(tmp_path / "b", rows) == alone
    with pytest.raises(UserError, match="returned nan: return a finite number"):
        run(tmp_path / "c", rows, {"tests.tasks.stages.test_score:not_a_number": 1.0})


def test_when_processes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert stage.num_processes(stage.PARALLEL_ROWS - 1, Style.TAGS) == 1
    assert stage.num_processes(stage.PARALLEL_ROWS, Style.TAGS) == stage.MOST_PROCESSES
    assert stage.num_processes(10**6, Style.BOXED) == 1


def test_mixed_completions_are_refused(tmp_path: Path) -> None:
    good = completion(PERFECT, 0)
    cases = {
        "models": (completion(PERFECT, 1, model_key="other"), "mixes completions of 2 models"),
        "format": (completion(PERFECT, 1, prompt_format="boxed"), "prompt format boxed, not tags"),
        "question": (
            completion(PERFECT, 1, question_id="x"),
            "1 completions belong to no question",
        ),
        "heldout": (completion(PERFECT, 1, question_id="held"), "belong to no question"),
    }
    for name, (bad, message) in cases.items():
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=message):
            run(tmp_path / name, [good, bad])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no completions"):
        run(tmp_path / "empty", [])


def nan_reward(completions: list[str], **_: Any) -> list[float]:
    """A reward of the user's own that is broken."""
    return [float("nan")] * len(completions)


def test_a_reward_that_gives_nan_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"reward '{__name__}:nan_reward' returned nan"):
        run(tmp_path, [completion(PERFECT, 0)], {f"{__name__}:nan_reward": 1.0})
