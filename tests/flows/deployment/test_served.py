"""What `ratchet ui` serves: forms, triggers, reruns, schedules, turns on the device."""

from __future__ import annotations

import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ratchet.pipeline.dag import STAGES
from ratchet.store.runs import RunRecord, RunStatus, all_runs, load_run
from ratchet.store.store import Store
from tests.support.recorded_run import environment, record, run_arguments, start, states
from tests.support.served_ui import Ui, pids_with, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    folder = tmp_path_factory.mktemp("served")
    running = Ui.start(folder / "home", Store(folder / "store"))
    try:
        yield running
    finally:
        output = running.stop()
    assert running.process.returncode == 0 and "stopped" in output, output
    assert not (running.home / "ratchet-ui.json").exists()
    assert pids_with(str(folder)) == []


@pytest.fixture(scope="module")
def base(ui: Ui) -> RunRecord:
    """A complete run of the first two stages, handed over by the command line."""
    found = record(ui.store, ["questions"])
    terminal = ui.run(found)
    output, _ = terminal.communicate(timeout=240)
    assert terminal.returncode == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("run by `ratchet ui`; Ctrl-C cancels it. http://127.0.0.1:")
    shown = [line.split()[:2] for line in lines if " done " in line]
    assert shown == [["model", "done"], ["questions", "done"]]
    after = load_run(ui.store, found.run_id)
    assert after.status is RunStatus.COMPLETED
    below = [run["state_name"] for run in ui.subflows(str(after.prefect_flow_run_id))]
    assert below == ["Completed", "Completed"]
    return after


def record_of(ui: Ui, flow_run_id: str) -> RunRecord:
    (found,) = (run for run in all_runs(ui.store) if run.prefect_flow_run_id == flow_run_id)
    return found


def schema(ui: Ui, name: str) -> dict[str, Any]:
    return ui.call(f"/deployments/name/{name}")["parameter_openapi_schema"]


def test_every_stage_has_a_form_with_its_own_settings(ui: Ui) -> None:
    found = ui.call("/deployments/filter", {})
    assert {item["name"] for item in found} == {"full", "recorded", *STAGES}
    full = schema(ui, "full/full")
    first = sorted(full["properties"], key=lambda name: full["properties"][name]["position"])
    assert first[:3] == ["preset", "start_from", "name"] and first[-1] == "store"
    assert "demo" in full["definitions"]["Preset"]["enum"]
    assert full["properties"]["grpo_steps"]["title"] == "GRPO steps"
    assert all(item["description"] for item in full["properties"].values())
    own = schema(ui, "stage/filter")["definitions"]["Change_filter"]["properties"]
    assert {"keep_above", "keep_below", "score"} <= set(own)
    assert own["keep_below"]["title"] == "Keep below" and own["keep_below"]["default"] is None
    assert "change" not in schema(ui, "stage/report")["properties"]


def test_ui_twice_says_that_it_runs(ui: Ui, tmp_path: Path) -> None:
    process = start("flows.deployment.ui", environment(ui.home), "--store", str(tmp_path))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    begin = f"error: the UI runs already at http://127.0.0.1:{ui.port}: open it, or stop it"
    assert output.startswith(begin)
    assert len(output.splitlines()) == 1


def test_ui_on_a_taken_port_says_who_has_it(ui: Ui, tmp_path: Path) -> None:
    options = ["--store", str(tmp_path), "--port"]
    process = start("flows.deployment.ui", environment(tmp_path), *options, str(ui.port))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and len(output.splitlines()) == 1
    assert output.startswith("error: another Prefect server (version 3.")
    assert f"uses port {ui.port}" in output
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        process = start("flows.deployment.ui", environment(tmp_path), *options, port)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == (f"error: port {port} is taken by another program: take another with --port\n")


def test_bad_input_is_one_line_and_records_nothing(ui: Ui, base: RunRecord) -> None:
    known = len(all_runs(ui.store))
    cases = [
        (ui.trigger("full/full", settings="filter.kep_below=1"), "did you mean 'keep_below'?"),
        (ui.trigger("full/full", start_from="nonesuch"), "'nonesuch' is neither a run nor"),
        (ui.trigger("stage/filter", run="score/ffffff"), "'score/ffffff' is neither a run nor"),
        (ui.trigger("stage/filter", run=base.run_id), "'filter' needs 'decontaminate', which"),
        (
            ui.trigger("stage/questions", run=base.run_id, settings="model.dtype=bfloat16"),
            "'questions' needs 'model', which would have to run first: model.dtype: float32",
        ),
    ]
    for flow_run_id, words in cases:
        state = ui.wait_until_ended(flow_run_id)
        assert state["name"] == "Failed", words
        assert words in state["message"] and "\n" not in state["message"]
    assert len(all_runs(ui.store)) == known
    with pytest.raises(urllib.error.HTTPError) as refused:
        ui.trigger("full/full", preset="nonesuch")
    assert b"'nonesuch' is not one of ['demo'" in refused.value.read()


def test_a_stage_again_with_another_setting(ui: Ui, base: RunRecord) -> None:
    key = base.nodes["questions"].key
    flow_run_id = ui.trigger("stage/questions", run=key[:10], change={"max_prompt_tokens": 150})
    assert ui.wait_until_ended(flow_run_id)["name"] == "Completed"
    made = record_of(ui, flow_run_id)
    assert made.config["questions"]["max_prompt_tokens"] == 150
    assert made.based_on == base.run_id and made.targets == ["questions"]
    assert made.command.startswith(f"ratchet stage questions --run {key[:10]} --set ")
    assert states(made) == {"model": "reused", "questions": "done"}
    below = [run["state_name"] for run in ui.subflows(flow_run_id)]
    assert below == ["Cached", "Completed"]

    # Retry skips what is complete, unless its artifact is gone.
    questions = made.nodes["questions"]
    shutil.rmtree(ui.store.folder("questions", questions.key))
    ui.retry(flow_run_id)
    wait_for(lambda: ui.store.find("questions", questions.key), 120, "made anew")
    assert ui.wait_until_ended(flow_run_id)["name"] == "Completed"
    assert record_of(ui, flow_run_id).run_id == made.run_id
    assert states(load_run(ui.store, made.run_id)) == {"model": "reused", "questions": "done"}

    for node in made.nodes["model"], questions:
        shutil.rmtree(ui.store.folder(node.stage, node.key))
    ui.retry(flow_run_id)
    wait_for(lambda: ui.store.find("questions", questions.key), 120, "both made anew")
    assert ui.wait_until_ended(flow_run_id)["name"] == "Completed"
    assert states(load_run(ui.store, made.run_id)) == {"model": "done", "questions": "done"}


def test_a_scheduled_run_starts_and_reuses(ui: Ui, base: RunRecord) -> None:
    deployment = ui.call("/deployments/name/stage/questions")["id"]
    every = {"schedule": {"interval": 30}, "active": True, "parameters": {"run": base.run_id}}
    ui.call(f"/deployments/{deployment}/schedules", [every])
    wanted = {"flow_runs": {"deployment_id": {"any_": [deployment]}}}

    def started() -> list[dict[str, Any]]:
        runs = ui.call("/flow_runs/filter", wanted)
        return [run for run in runs if run["auto_scheduled"] and run["state_type"] == "COMPLETED"]

    wait_for(started, 150, "the scheduled run completes")
    ui.call(f"/deployments/{deployment}/pause_deployment", {})
    below = ui.subflows(started()[0]["id"])
    assert [run["state_name"] for run in below] == ["Cached", "Cached"]


def test_runs_take_turns_on_the_device(ui: Ui) -> None:
    """Two runs at once, both of which need the device twice."""
    settings = (
        "sampler.engine=transformers", 'benchmark.formats=["tags_short"]', "presample.k=2",
        "presample.k_block=2",
    )  # fmt: skip
    both = [
        record(ui.store, ["benchmark", "presample"], f"seed={seed}", *settings) for seed in (1, 2)
    ]
    terminals = [ui.run(found) for found in both]
    outputs = [terminal.communicate(timeout=400)[0] for terminal in terminals]
    assert [terminal.returncode for terminal in terminals] == [0, 0], outputs
    assert any("the device is taken: waiting for process" in output for output in outputs)
    used = []
    for found in both:
        for name in ("benchmark", "presample"):
            node = load_run(ui.store, found.run_id).nodes[name]
            manifest = ui.store.get(node.stage, node.key).manifest
            began = datetime.fromisoformat(manifest.started_at)
            used.append((began, began + timedelta(seconds=manifest.duration_seconds)))
    used.sort()
    assert all(first[1] <= second[0] for first, second in pairwise(used))


def test_the_ui_serves_its_pages(ui: Ui) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{ui.port}/v2/runs", timeout=60) as page:
        assert b"<title>" in page.read()


def test_without_prefects_database_everything_is_there(ui: Ui, base: RunRecord) -> None:
    """Another home is what a deleted one amounts to: no history, no deployments."""
    elsewhere = ui.home.with_name("elsewhere")
    again = record(ui.store, ["questions"])
    terminal = start("flows.run", environment(elsewhere), *run_arguments(ui.store, again))
    output, _ = terminal.communicate(timeout=120)
    assert terminal.returncode == 0, output
    assert states(load_run(ui.store, again.run_id)) == {"model": "reused", "questions": "reused"}
    assert not (elsewhere / "prefect.db").exists()
    fresh = Ui.start(elsewhere, ui.store)
    try:
        flow_run_id = fresh.trigger("stage/questions", run=base.run_id, force=True)
        assert fresh.wait_until_ended(flow_run_id)["name"] == "Completed"
        below = [run["state_name"] for run in fresh.subflows(flow_run_id)]
        assert below == ["Cached", "Completed"]
    finally:
        fresh.stop()
