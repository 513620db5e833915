"""The verifier against public data sets and collected cases (see the `shared` fixture)."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ratchet.questions.rewrite import rewrite_solution
from ratchet.rewards.weights import DEFAULT_WEIGHTS_TAGS, resolve_rewards
from ratchet.verifier import DEFAULT_DEADLINE_SECONDS, Verdict, verify, verify_batch

pytestmark = pytest.mark.needs_shared


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def gsm8k(shared: Path) -> list[dict[str, str]]:
    rows = [
        row for name in ("train", "test") for row in rows_of(shared / f"data/gsm8k/{name}.jsonl")
    ]
    return [{**row, "gold": row["answer"].rpartition("####")[2].strip()} for row in rows]


def math_golds(shared: Path) -> tuple[list[str], list[dict[str, Any]]]:
    train = json.loads((shared / "data/math_train_rllm/math_train.json").read_text())
    return [row["answer"] or "" for row in train], rows_of(shared / "data/math500/test.jsonl")


@pytest.mark.parametrize("name", ["reported", "probes"])
def test_collected_cases(shared: Path, name: str) -> None:
    rows = rows_of(shared / f"cases/verifier/{name}.jsonl")
    verdicts = verify_batch(
        [row["completion"] for row in rows],
        [row["gold"] for row in rows],
        [row["style"] for row in rows],
    )
    wrong = []
    for row, verdict in zip(rows, verdicts, strict=True):
        given = verdict.strict if "tags" in row["style"] else verdict.lenient
        if given != row["expected_correct"]:
            wrong.append((row["id"], verdict))
        parse = row.get("expected_parse")
        status = "parse_failure" if verdict.status == "too_complex" else verdict.status
        if parse is not None and status != parse and not row["policy_choice"]:
            wrong.append((row["id"], verdict))
    assert wrong == []


@pytest.mark.parametrize(
    ("style", "shape"),
    [
        ("tags", "<start_working_out>w<end_working_out><SOLUTION>{}</SOLUTION>"),
        ("hash", "w\n#### {}"),
        ("plain", "it is {}"),
        ("boxed", "\\boxed{{{}}}"),
    ],
)
def test_gsm8k_golds_accept_themselves(shared: Path, style: str, shape: str) -> None:
    golds = [row["gold"] for row in gsm8k(shared)]
    verdicts = verify_batch([shape.format(gold) for gold in golds], golds, style)
    assert len(golds) == 8792
    assert all(verdict.strict for verdict in verdicts)


def test_math_golds_accept_themselves(shared: Path) -> None:
    train, test = math_golds(shared)
    golds = train + [row["answer"] for row in test]
    verdicts = verify_batch([f"\\boxed{{{gold}}}" for gold in golds], golds, "boxed")
    refused = [gold for gold, verdict in zip(golds, verdicts, strict=True) if not verdict.strict]
    assert (len(train), len(test)) == (7474, 500)
    assert refused == [""] * 4  # rows of the data set without an answer


def test_math_golds_accept_themselves_rewritten(shared: Path) -> None:
    """Not literally equal any more: display fractions, sized brackets, spaces, a final period."""
    train, test = math_golds(shared)
    golds = sorted({gold for gold in train + [row["answer"] for row in test] if gold})
    rewritten = [
        gold.replace("\\frac", "\\dfrac").replace("(", "\\left( ").replace(")", " \\right)")
        for gold in golds
        if "\\left" not in gold
    ]
    kept = [gold for gold in golds if "\\left" not in gold]
    verdicts = verify_batch([f"\\boxed{{ {text}. }}" for text in rewritten], kept, "boxed")
    refused = [(g, v) for g, v in zip(kept, verdicts, strict=True) if not v.lenient]
    assert refused == []


def test_math500_solutions_are_right(shared: Path) -> None:
    _, test = math_golds(shared)
    verdicts = verify_batch(
        [row["solution"] for row in test], [row["answer"] for row in test], "boxed"
    )
    assert [r["answer"] for r, v in zip(test, verdicts, strict=True) if not v.lenient] == []


def test_shuffled_golds_are_wrong(shared: Path) -> None:
    train, test = math_golds(shared)
    golds = [gold for gold in train + [row["answer"] for row in test] if gold]
    rng = random.Random(0)
    chosen = rng.sample(range(len(golds)), 3000)
    other = rng.sample(chosen, len(chosen))
    pairs = [
        (golds[a], golds[b]) for a, b in zip(chosen, other, strict=True) if golds[a] != golds[b]
    ]
    verdicts = verify_batch([f"\\boxed{{{b}}}" for _, b in pairs], [a for a, _ in pairs], "boxed")
    accepted = {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.lenient}
    assert len(pairs) > 2900
    assert accepted == {("10", "10^\\circ")}  # the same by policy: degrees are a unit


def test_gsm8k_solutions_score_full_marks(shared: Path) -> None:
    rows = rows_of(shared / "data/gsm8k/train.jsonl")
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
    columns = {
        "completions": [
            rewrite_solution(row["answer"], gold, "tags")
            for row, gold in zip(rows, golds, strict=True)
        ],
        "gold": golds,
        "question": [row["question"] for row in rows],
        "reference_solution": [row["answer"] for row in rows],
        "style": ["tags"] * len(rows),
    }
    assert len(rows) == 7473
    for name, function, _ in resolve_rewards(DEFAULT_WEIGHTS_TAGS):
        full = 0.5 if name == "tag_check" else 1.0
        allowed = {full, None} if name == "step_check" else {full}
        assert set(function(**columns)) == allowed, name


def hostile(shared: Path) -> list[tuple[str, str, str]]:
    path = shared / "cases/verifier/hostile.py"
    spec = importlib.util.spec_from_file_location("hostile_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


@pytest.mark.parametrize("where", ["main", "thread"])
def test_hostile_cases_get_their_verdict_in_time(shared: Path, where: str) -> None:
    verify("\\boxed{\\sqrt{12}}", "2\\sqrt{3}", "boxed")  # the workers are up
    late: list[tuple[str, float]] = []
    verdicts: list[Verdict] = []

    def run() -> None:
        for name, gold, completion in hostile(shared):
            for style in ("boxed", "tags", "hash", "plain"):
                start = time.monotonic()
                verdicts.append(verify(completion, gold, style))
                seconds = time.monotonic() - start
                if seconds > DEFAULT_DEADLINE_SECONDS + 0.5:
                    late.append((name, seconds))

    if where == "main":
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(verdicts) == 4 * len(hostile(shared)) > 300
    assert late == []


@pytest.mark.slow
def test_hostile_cases_from_a_prefect_task(shared: Path) -> None:
    from prefect import flow, task
    from prefect.testing.utilities import prefect_test_harness

    @task
    def judge(cases: list[tuple[str, str, str]]) -> list[float]:
        seconds = []
        for _, gold, completion in cases:
            start = time.monotonic()
            verify(completion, gold, "boxed")
            seconds.append(time.monotonic() - start)
        return seconds

    @flow
    def judging() -> list[float]:
        verify("\\boxed{\\sqrt{12}}", "2\\sqrt{3}", "boxed")
        return judge.submit(hostile(shared)).result()

    with prefect_test_harness(server_startup_timeout=240):
        seconds = judging()
    assert len(seconds) == len(hostile(shared))
    assert max(seconds) <= DEFAULT_DEADLINE_SECONDS + 0.5
