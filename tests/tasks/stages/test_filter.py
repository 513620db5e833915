"""The filter stage on hand-made scores."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import FilterConfig, GrpoConfig, HeadroomConfig
from ratchet.errors import UserError
from ratchet.store.schemas import read_table
from tasks.stages import filter as stage
from tasks.stages import headroom as gate
from tests.support.made_up import artifact, context, question


def scores(right: dict[str, str]) -> list[dict[str, Any]]:
    """Per question a string of samples: '+' strictly right, '~' leniently right, '-' wrong."""
    return [
        {
            "question_id": question_id,
            "sample_index": index,
            "status": "ok",
            "extracted": "4",
            "strict": mark == "+",
            "lenient": mark in "+~",
            "truncated": False,
            "num_tokens": 20,
            "reward_exact": float(mark == "+"),
        }
        for question_id, marks in right.items()
        for index, mark in enumerate(marks)
    ]


RIGHT = {"never": "----", "format": "~~~~", "some": "+-~-", "most": "+++-", "always": "++++"}


def run(
    tmp_path: Path,
    right: dict[str, str],
    config: FilterConfig,
    questions: list[dict[str, Any]] | None = None,
    seed: int = 0,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = questions or [question(name) for name in right]
    inputs = {
        "scores": artifact(tmp_path / "scores", "score", {"scores": scores(right)}),
        "questions": artifact(tmp_path / "questions", "questions", {"questions": rows}),
    }
    ctx = context(tmp_path, inputs, seed)
    result = stage.run(ctx, filter=config, grpo=GrpoConfig(group_size=4))
    table = read_table(ctx.out_dir / "selection.parquet", "selection")
    return table.to_pylist(), result.summary


def test_lenient_filter_gives_every_question_a_role_and_a_reason(tmp_path: Path) -> None:
    questions = [question(name) for name in reversed(RIGHT)]
    questions[-1]["reference_solution"] = None  # 'never'
    held_out = question("heldout", role="test")
    rows, summary = run(tmp_path, RIGHT, FilterConfig(), [*questions, held_out])
    assert [row["question_id"] for row in rows] == ["always", "most", "some", "format", "never"]
    roles = {row["question_id"]: row["role"] for row in rows}
    assert roles == {
        "never": "dropped",
        "format": "warmup",
        "some": "rl",
        "most": "rl",
        "always": "warmup",
    }
    why = {row["question_id"]: row["why"] for row in rows}
    assert why["some"] == "2 of 4 leniently right: some right, some wrong"
    assert why["never"].endswith("no gradient; no reference solution")
    some = rows[2]
    assert (some["pass_rate_lenient"], some["pass_rate_strict"]) == (0.5, 0.25)
    assert some["bucket"] == "live"
    assert summary["roles"] == {"rl": 2, "warmup": 2, "dropped": 1}
    assert summary["roles_by_bucket"]["always_right"] == {"rl": 0, "warmup": 2, "dropped": 0}
    assert summary["headroom"]["pass_at_1_lenient"] == pytest.approx((0 + 1 + 0.5 + 0.75 + 1) / 5)
    # mixed sets of 4 out of 4 samples: exactly the two live questions
    assert summary["headroom"]["live_share"] == pytest.approx(2 / 5)


def test_strict_filter_and_bounds(tmp_path: Path) -> None:
    config = FilterConfig(score="strict", keep_above=0.25, keep_below=0.9)
    rows, _ = run(tmp_path, RIGHT, config)
    by_id = {row["question_id"]: row for row in rows}
    assert [name for name, row in by_id.items() if row["role"] == "rl"] == ["most"]
    assert by_id["some"]["why"] == "1 of 4 strictly right: at or below filter.keep_above=0.25"
    assert by_id["format"]["bucket"] == "always_wrong"


def test_easy_share_is_seeded_and_counted(tmp_path: Path) -> None:
    right = {f"easy{index}": "++++" for index in range(10)} | {"some": "+---"}
    chosen = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        (tmp_path / name).mkdir()
        rows, summary = run(tmp_path / name, right, FilterConfig(easy_share=0.3), seed=seed)
        assert summary["num_easy_kept"] == 3
        chosen.append({row["question_id"] for row in rows if row["role"] == "rl"})
    assert len(chosen[0]) == 4
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_share_of_the_live_questions_is_held_back_for_the_warm_start(tmp_path: Path) -> None:
    right = {f"live{index}": "+---" for index in range(10)} | {"never": "----"}
    rows = [question(name, reference_solution=None) for name in right]
    held_back = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        (tmp_path / name).mkdir()
        table, summary = run(tmp_path / name, right, FilterConfig(warmup_share=0.3), rows, seed)
        # of use without a reference solution, because some samples are right
        assert summary["roles"] == {"rl": 7, "warmup": 3, "dropped": 1}
        chosen = [row for row in table if row["role"] == "warmup"]
        assert {row["why"] for row in chosen} == {
            "1 of 4 leniently right: held back for the warm-start"
        }
        held_back.append({row["question_id"] for row in chosen})
    assert held_back[0] == held_back[1] != held_back[2]


def test_an_empty_rl_set_says_why_and_what_to_do(tmp_path: Path) -> None:
    right = {"a": "----", "b": "----", "c": "++++"}
    with pytest.raises(UserError) as caught:
        run(tmp_path, right, FilterConfig())
    message = str(caught.value)
    assert "of 3 questions 2 are always wrong, 0 live and 1 always right in 4 samples" in message
    assert "pass@1 0.333 lenient" in message
    assert "pass@4 0.333" in message
    assert "warm up by SFT" in message
    assert "\n" not in message


def test_bounds_that_leave_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"widen filter\.keep_above .* \(2 questions are live\)"):
        run(tmp_path, RIGHT, FilterConfig(keep_above=0.8, keep_below=0.9))


def test_too_few_live_groups_stop_the_run(tmp_path: Path) -> None:
    _, summary = run(tmp_path, RIGHT, FilterConfig())
    chosen = artifact(tmp_path / "out", "filter", {}, summary=summary)

    def passes(level: float) -> dict[str, Any]:
        folder = tmp_path / f"{level}"
        folder.mkdir()
        ctx = context(folder, {"selection": chosen})
        found = gate.run(ctx, headroom=HeadroomConfig(min_live_share=level)).summary
        assert json.loads((ctx.out_dir / "headroom.json").read_text()) == found
        return found

    share = summary["rl_live_share"]
    assert 0.5 < share < 0.95 and "refused" not in passes(share)
    refused = passes(0.95)["refused"]
    assert "of the RL groups of 4 are expected to be live, below headroom.min_live_share=0.95" in (
        refused
    )
    assert f"recommendation: {summary['recommendation']['action']} (" in refused


def test_one_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 1 sample"):
        run(tmp_path, {"a": "+-", "b": "+"}, FilterConfig())


def test_scores_and_questions_must_match(tmp_path: Path) -> None:
    (tmp_path / "fewer").mkdir()
    (tmp_path / "more").mkdir()
    three = [question(name) for name in ("a", "b", "c")]
    with pytest.raises(UserError, match="1 of 3 training questions have no scores"):
        run(tmp_path / "fewer", {"a": "+-", "b": "+-"}, FilterConfig(), three)
    with pytest.raises(UserError, match="1 questions that are not in the training set"):
        run(tmp_path / "more", {"a": "+-", "b": "+-", "c": "++", "d": "++"}, FilterConfig(), three)


def test_the_summary_counts_what_the_table_holds(tmp_path: Path) -> None:
    rows, summary = run(tmp_path, RIGHT, FilterConfig(easy_share=0.5))
    assert summary["roles"] == {"dropped": 0} | Counter(row["role"] for row in rows)
    buckets = Counter(row["bucket"] for row in rows)
    assert {name: sum(roles.values()) for name, roles in summary["roles_by_bucket"].items()} == (
        dict(buckets)
    )
