"""A stage is one file and one line: planned, run, reused, shown and reported from there."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.execution.executor import NodeOutcome, RunExecutor
from flows.pages.run_page import run_page
from flows.pages.stage_page import Links, node_page
from flows.pages.tables import stage_table
from flows.pipeline import forms
from ratchet.pipeline.plan import make_plan
from ratchet.pipeline.stages import STAGES
from ratchet.report.gather import gather
from ratchet.report.render import render
from ratchet.store import code
from ratchet.store.runs import NodeState
from ratchet.store.store import Artifact, Store
from tests.support.made_up_run import make_run
from tests.support.recorded_run import record

FILE = '''
"""Counts the words of the questions."""

from ratchet.pipeline.stage import Stage
from ratchet.report.figures import Chart
from tasks.runtime.context import StageResult


def run(ctx, *, decontaminate):
    rows = ctx.inputs["questions"].table("questions").to_pylist()
    words = [len(row["question"].split()) for row in rows]
    (ctx.out_dir / "words.txt").write_text("\\n".join(map(str, words)))
    summary = {"questions": len(words), "words": sum(words), "run": decontaminate.words}
    return StageResult(summary=summary, markdown="Words were counted.")


def plot(data):
    words = data.manifests["tally"].summary["words"]
    return Chart(f"{words} words", '<svg viewBox="0 0 10 10"></svg>', "One plot.")


STAGE = Stage(
    "tally", "tally:run", "count words", sections=("decontaminate",),
    inputs={"questions": "decontaminate"}, form="decontaminate", charts=("tally:plot",),
)
'''


def carried_out(store: Store) -> tuple[RunExecutor, NodeOutcome]:
    """A run that was asked for the new stage, and what became of it."""
    executor = RunExecutor(store, record(store, ["tally"]).run_id)
    executor.begin()
    outcomes = [executor.run_node(planned) for planned in executor.needed]
    assert executor.finish() == 0
    assert [one.name for one in outcomes] == ["model", "questions", "decontaminate", "tally"]
    return executor, outcomes[-1]


def shown(store: Store, ref: str) -> str:
    """What `ratchet show` prints."""
    result = CliRunner().invoke(app, ["show", ref, "--store", str(store.root)])
    assert result.exit_code == 0, result.output
    return result.stdout


def report_with(folder: Path, made: Artifact) -> str:
    """The report of a whole run that has the artifact, too."""
    return render(gather(make_run(folder) | {"tally": made}, "run-1"))


def test_one_file_and_one_line_make_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tally.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setitem(STAGES, "tally", importlib.import_module("tally").STAGE)  # the line

    store = Store(tmp_path / "store")
    executor, built = carried_out(store)
    plan = executor.plan
    assert plan.nodes[-1].node.name == "report"
    assert plan.named("report").node.inputs["tally"] == "tally"
    assert built.state is NodeState.DONE

    planned = plan.named("tally")
    made = store.get("tally", planned.key)
    words = made.manifest.summary["words"]
    assert words == sum(map(int, made.path("words.txt").read_text().split())) > 100

    again, found = carried_out(store)
    assert found.state is NodeState.REUSED and found.key == built.key

    text = shown(store, again.record.run_id)
    assert f"tally/{planned.key[:8]}" in text
    text = shown(store, f"{again.record.run_id}/tally")
    assert "Words were counted." in text and f"{words:,}" in text

    headline = f"questions 32, words {words}, run 13"
    page = node_page(executor, planned, built, Links())
    assert f"## {headline}" in page and "Words were counted." in page and "Count words." in page
    assert f"**{words} words**" in page and "data:image/svg+xml" in page
    assert "decontaminate" in page.partition("## Made from")[2]
    assert {"figure": "words", "value": words} in stage_table(made)
    page = run_page(executor, Links())
    assert headline in page and "<b>tally</b><br/>questions 32" in page
    assert forms.change_model("tally") is not None

    assert f"tally/{planned.key}" in report_with(tmp_path / "whole", made)

    (tmp_path / "tally.py").write_text(FILE.replace("sum(words)", "max(words)"))
    code.covered.cache_clear()
    code._module_parts.cache_clear()
    changed = make_plan(executor.config, store, previous=again.record).named("tally")
    assert changed.state == "run" and changed.why == "its code has changed"
    code.covered.cache_clear()
    code._module_parts.cache_clear()
