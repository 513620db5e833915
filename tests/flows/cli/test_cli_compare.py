"""`ratchet compare`: finding the evaluations two names stand for, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.cli.compare import evaluations, matching
from ratchet.errors import UserError
from ratchet.store.runs import NodeRecord, RunRecord, create_run, now
from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Artifact, Store
from tests.ratchet.evaluation.test_comparison import MARKS, SETTINGS, answers, pick
from tests.support.made_up import artifact, question

HOSTILE = "[red]not markup[/] <script>alert(1)</script> [/]"


def commit(
    store: Store, stage: str, key: str, tables: dict[str, Any], started: str = "01", **fields: Any
) -> Artifact:
    fields |= {"key": key, "started_at": f"2026-01-{started}T00:00:00+00:00"}
    written = artifact(store.root / ".scratch", stage, {}, **fields).manifest
    with store.build(stage, key) as build:
        (build.out_dir / "key").write_text(key)  # so that contents differ
        for name, rows in tables.items():
            write_table(build.out_dir / f"{name}.parquet", name, to_table(name, rows))
        return store.commit(build, written)


def questions(store: Store, key: str, names: list[str]) -> Artifact:
    sources = [{"kind": "file", "name": "made-up", "templates": "seen"}]
    rows = [
        question(name, role="test", band="hard" if name in ("q1", "q2") else "easy")
        for name in names
    ]
    return commit(
        store, "questions", key, {"questions": rows}, config={"questions": {"test": sources}}
    )


def evaluated(
    store: Store, key: str, model: Artifact, asked: Artifact, position: int, **fields: Any
) -> Artifact:
    marks = pick(MARKS, position)
    rows = answers("x", marks)
    for row in rows:
        row["text"] = f"{HOSTILE} variant {position} says {marks[row['question_id']]}"
    settings = SETTINGS | {"evaluate": {"samples": 0, "temperature": 1.0, "confidence": 0.95}}
    fields = {"config": settings, "summary": {"verifier": "2-aa"}} | fields
    parents = {"model": model.as_parent(), "questions": asked.as_parent()}
    return commit(store, "evaluate", key, {"eval": rows}, parents=parents, **fields)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    asked = questions(store, "qq", list(MARKS))
    facts = {"source": "seedling", "path": "/models/seedling"}
    model = commit(store, "model", "aa1", {}, summary=facts)
    trained = commit(store, "grpo", "bb1", {}, device_seconds=120.0)
    evaluated(store, "ea1", model, asked, 0)
    evaluated(store, "ea2", trained, asked, 1, started="02")
    return store


def compare(store: Store, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["compare", *arguments, "--store", str(store.root)], env={"COLUMNS": "80"}
    )


def test_models_are_found_by_what_evaluated_them(store: Store) -> None:
    assert [item.manifest.key for item in evaluations(store, "seedling")] == ["ea1"]
    assert [item.manifest.key for item in evaluations(store, "/models/seedling")] == ["ea1"]
    assert [item.manifest.key for item in evaluations(store, "grpo/bb1")] == ["ea2"]
    assert [item.manifest.key for item in evaluations(store, "ea2")] == ["ea2"]
    # of two evaluations the one that fits is taken, though another is newer
    other = SETTINGS | {"prompt": {"format": "boxed"}}
    trained, asked = store.get("grpo", "bb1"), store.get("questions", "qq")
    evaluated(store, "ea3", trained, asked, 1, started="03", config=other)
    assert [item.manifest.key for item in evaluations(store, "bb1")] == ["ea3", "ea2"]
    assert [item.manifest.key for item in matching(store, "seedling", "bb1")] == ["ea1", "ea2"]


def test_two_runs_are_compared_by_what_rl_made(store: Store) -> None:
    for name, key in (("one", "ea1"), ("two", "ea2")):
        record = RunRecord(
            run_id=f"{name}-20260101",
            name=name,
            created_at=now(),
            config={},
            command="ratchet run",
            targets=["evaluate.rl"],
            nodes={"evaluate.rl": NodeRecord(stage="evaluate", key=key)},
        )
        create_run(store, record)
    assert [item.manifest.key for item in matching(store, "one", "two-2026")] == ["ea1", "ea2"]
    assert [item.manifest.key for item in matching(store, "latest", "one")] == ["ea2", "ea1"]


def test_the_table_the_verdict_and_both_completions_are_printed(store: Store) -> None:
    done = compare(store, "seedling", "grpo/bb1", "--changed", "9")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "inside the noise: made-up 25.0% → 75.0% strict, +50.0 points" in text
    assert "'grpo/bb1' took 120 device-seconds beyond 'seedling' and gained nothing" in text
    assert "made-up strict 8 25.0 → 75.0 +50.0" in text
    assert "+5 −1" in text
    assert max(map(len, done.output.splitlines())) <= 80
    assert text.count("improved by maths: ") == 4
    assert text.count("regressed by maths: ") == 1
    assert text.count("improved by format: ") == 2
    assert f"{HOSTILE} variant 0 says -" in text  # as written, markup and all
    assert f"{HOSTILE} variant 1 says +" in text


def test_a_band_alone_and_json(store: Store) -> None:
    found = json.loads(compare(store, "seedling", "bb1", "--band", "hard", "--json").output)
    assert {(row["metric"], row["num_questions"]) for row in found["compared"]} == {
        ("strict", 2), ("lenient", 2),
    }  # fmt: skip
    assert found["variants"] == {"seedling": "evaluate/ea1", "bb1": "evaluate/ea2"}
    assert {row["question_id"] for row in found["changed_answers"]} == {"q1", "q2"}


def test_what_cannot_be_compared_is_refused(store: Store) -> None:
    asked, model = store.get("questions", "qq"), store.get("model", "aa1")
    fewer = questions(store, "q2", [*list(MARKS)[:6], "q9"])
    lonely = commit(store, "warmstart_sft", "ww1", {})
    tiny = commit(store, "grpo", "cc1", {})
    evaluated(store, "ec1", tiny, fewer, 1)
    verifier = commit(store, "grpo", "dd1", {})
    evaluated(store, "ed1", verifier, asked, 1, summary={"verifier": "1-00"})
    cases = {
        ("seedling", "seedling"): "are both evaluate/ea1",
        ("seedling", lonely.ref): "has not been evaluated",
        ("seedling", tiny.ref): r"different questions \(8 and 7, 6 in common\)",
        ("seedling", verifier.ref): r"different verifiers \(2-aa and 1-00\)",
        ("seedling", "nothing"): "names no artifact",
        (model.ref, "bb1", "--band", "9"): "holds no question: its bands are all, easy, hard",
        (model.ref, "bb1", "--benchmark", "gsm8k"): "no question belongs to benchmark 'gsm8k'",
    }
    for arguments, message in cases.items():
        done = compare(store, *arguments)
        assert isinstance(done.exception, UserError), arguments
        with pytest.raises(UserError, match=message):
            raise done.exception
        assert "\n" not in str(done.exception)
