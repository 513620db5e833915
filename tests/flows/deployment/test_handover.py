"""To whom a run is handed over, and following one that another process carries out."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console

from flows.deployment.handover import Follower, find_serving
from flows.deployment.serve import served_from
from flows.execution.events import Recorder, events_file
from flows.execution.executor import RunExecutor
from flows.execution.terminal import Display
from ratchet.store.runs import NodeState, RunStatus, carrying_out, load_run, update_run
from ratchet.store.store import Store
from tasks.runtime.launch import EventFile
from tests.support.answering import answering
from tests.support.recorded_run import record


def test_a_run_is_handed_over_to_the_same_store_and_code_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    executor = RunExecutor(store, record(store, ["model"]).run_id, Display([]))
    good = {
        "version": served_from(),
        "parameters": {"store": str(store.root)},
        "last_polled": datetime.now(UTC).isoformat(),
    }
    long_ago = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    others = [
        {"version": "elsewhere:/code"},
        {"parameters": {"store": "/another"}},
        {"last_polled": long_ago},
        {"last_polled": None},
    ]
    path = "/api/deployments/name/stage/recorded"
    with answering({path: good}) as url:
        assert find_serving(executor, url) == good
    for other in others:
        with answering({path: good | other}) as url:
            assert find_serving(executor, url) is None, other
    with answering({}) as url:
        assert find_serving(executor, url) is None


def test_the_terminal_shows_what_the_runs_process_recorded(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = record(store, ["model"])
    path = events_file(store, found.run_id)
    path.write_text('{"call": "line", "text": "of an earlier attempt"}\n')
    shown = io.StringIO()
    display = Display(["model"], Console(file=shown, width=100))
    events = EventFile.from_now(path)
    recorder = Recorder(path)
    recorder.begin("model")
    recorder.update({"event": "log", "message": "looking"})
    for done in range(100):  # more often than anybody reads
        recorder.update(
            {"event": "progress", "done": done, "total": 100, "unit": "files", "note": ""}
        )
    recorder.end("done", "abcdef", "0.1 s")
    recorder.exit(2)
    assert len(path.read_text().splitlines()) == 6
    with path.open("a") as file:
        file.write('{"call": "line", "te')  # a line that is still being written
    executor = RunExecutor(store, found.run_id, display)
    assert Follower(executor, "http://127.0.0.1:9/api", "x", events).follow() == 2
    assert shown.getvalue() == "model  looking\nmodel  done     abcdef  0.1 s\n"


def test_a_run_whose_process_died_ends_the_following_even_without_a_server(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = record(store, ["model"])
    running = found.model_copy(update={"status": RunStatus.RUNNING}).with_node(
        "model", state=NodeState.RUNNING
    )
    with carrying_out(store, found.run_id, print):
        update_run(store, running)
        assert load_run(store, found.run_id).status is RunStatus.RUNNING
    died = load_run(store, found.run_id)
    assert died.status is RunStatus.DIED
    assert (died.nodes["model"].state, died.nodes["model"].message) == (
        "failed",
        "its process died",
    )
    shown = io.StringIO()
    executor = RunExecutor(store, found.run_id, Display(["model"], Console(file=shown, width=100)))
    events = EventFile.from_now(events_file(store, found.run_id))
    assert Follower(executor, "http://127.0.0.1:9/api", "x", events).follow() == 1
    assert "its process died in 'model'; the same command continues there" in shown.getvalue()
