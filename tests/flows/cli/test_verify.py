"""`ratchet verify`, its self-test and `ratchet rewards audit`: the functions behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli.verify import grade_the_grader, rewards_audit, verify_file
from ratchet.audits.reward_audit import audit_rewards, table
from ratchet.errors import UserError


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def verdicts(tmp_path: Path, rows: list[object], style: str = "boxed") -> list[dict[str, object]]:
    out = tmp_path / "verdicts.jsonl"
    verify_file(write(tmp_path / "cases.jsonl", rows), out, style)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_in_order_with_their_own_style(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": "a", "gold": "2\\sqrt{3}", "completion": "\\boxed{\\sqrt{12}}", "note": "ignored"},
        {"id": 7, "gold": 5, "completion": "#### 5", "style": "hash"},
        {"id": "c", "gold": None, "completion": "\\boxed{1}", "style": None},
        {"id": "d", "gold": "1", "completion": None},
        {"id": "e", "gold": "9", "completion": "<SOLUTION>9</SOLUTION>", "style": "gsm8k_tags"},
    ]
    found = verdicts(tmp_path, rows)
    assert [row["id"] for row in found] == ["a", 7, "c", "d", "e"]
    assert [row["lenient"] for row in found] == [True, True, False, False, True]
    assert [row["strict"] for row in found] == [True, False, False, False, False]
    assert [row["status"] for row in found] == [
        "ok", "ok", "gold_unparseable", "parse_failure", "ok",
    ]  # fmt: skip
    assert list(found[0]) == [
        "id", "status", "strict", "lenient", "extracted", "reason", "seconds",
    ]  # fmt: skip
    assert all(isinstance(row["seconds"], float) for row in found)
    assert "5 verdicts" in capsys.readouterr().out


def test_more_rows_than_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.cli.verify.ROWS_AT_A_TIME", 3)
    rows: list[object] = [{"id": n, "gold": str(n), "completion": f"it is {n}"} for n in range(10)]
    assert [row["id"] for row in verdicts(tmp_path, rows, "plain")] == list(range(10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"cases.jsonl:2 is no JSON object"),
        ("[1]", r"cases.jsonl:2 is no JSON object"),
        ('{"id": 1, "gold": "1"}', r"cases.jsonl:2 lacks completion: it has id, gold"),
        ('{"id": 1, "gold": ["1"], "completion": ""}', "gold is a list"),
        ('{"id": 1, "gold": "1", "completion": "", "style": "x"}', "unknown answer style 'x'"),
    ],
)
def test_bad_rows_are_one_line_and_leave_the_output_alone(
    tmp_path: Path, line: str, message: str
) -> None:
    cases, out = tmp_path / "cases.jsonl", tmp_path / "out.jsonl"
    cases.write_text('{"id": 0, "gold": "1", "completion": "1"}\n' + line + "\n")
    out.write_text("before")
    with pytest.raises(UserError, match=message):
        verify_file(cases, out, "plain")
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cases.jsonl", "out.jsonl"]


def test_the_input_is_not_written_over(tmp_path: Path) -> None:
    cases = write(tmp_path / "cases.jsonl", [{"id": 1, "gold": "4", "completion": "4"}])
    before = cases.read_text()
    with pytest.raises(UserError, match="is the input, which would be lost"):
        verify_file(cases, tmp_path / "." / "cases.jsonl", "plain")
    assert cases.read_text() == before


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        verify_file(tmp_path / "none.jsonl", tmp_path / "out.jsonl", "tags")


def test_self_test_on_the_symbolic_source(capsys: pytest.CaptureFixture[str]) -> None:
    grade_the_grader("symbolic")
    out = capsys.readouterr().out
    assert "golds that accept themselves       1000 of 1000" in out
    assert "reference solutions accepted       1000 of 1000" in out
    assert "0 false accepts, 0 false rejects" in out


def test_self_test_names_golds_that_cannot_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[object] = [
        {"problem": "1+1?", "answer": "2"},
        {"problem": "Why?", "answer": "because it is so"},
    ]
    path = write(tmp_path / "own.jsonl", rows)
    with pytest.raises(UserError, match=r"1 gold answers of .* can never be matched"):
        grade_the_grader(str(path))
    assert "'because it is so': the gold holds no answer" in capsys.readouterr().out


def test_self_test_of_an_unknown_source() -> None:
    with pytest.raises(UserError, match="no source 'gsm9k'"):
        grade_the_grader("gsm9k")


def test_no_exploit_earns_more_than_the_table_pays() -> None:
    """Beyond an honest wrong answer in the right format, an exploit gets at most the 0.5 that the
    table pays for the right number anywhere, and a small share of the steps."""
    rows = audit_rewards()
    exploits = [row for row in rows if not row.attempt.honest]
    assert len(exploits) > 35
    for row in exploits:
        assert set(row.paid_by) <= {"lenient_correctness_check", "step_check"}, row
        unpaid = row.over_honest_wrong - 0.5 * (row.rewards.get("lenient_correctness_check") or 0)
        assert unpaid <= 0.125, row
        assert not row.rewards.get("exact_check"), row
        assert not row.rewards.get("correctness_check"), row
        assert not row.rewards.get("boxed_correctness"), row


def test_audit_knows_the_honest(capsys: pytest.CaptureFixture[str]) -> None:
    totals = {(row.attempt.name, row.attempt.style.value): row.total for row in audit_rewards()}
    assert totals["honest and right", "tags"] == 5.25
    assert totals["honest format, wrong throughout", "tags"] == 1.25
    assert totals["honest and right", "boxed"] == pytest.approx(1.1)
    assert totals["honest and wrong", "boxed"] == pytest.approx(0.1)
    rewards_audit()
    assert capsys.readouterr().out == table(audit_rewards()) + "\n"
