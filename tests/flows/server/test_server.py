"""Which server a run uses, and following a run that another process carries out."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from flows.deployment.handover import Recorder, _Follower, _Reader, events_file, find_serving
from flows.deployment.serve import served_from
from flows.execution.executor import Conductor
from flows.execution.terminal import Display
from flows.server import server
from ratchet.errors import UserError
from ratchet.store.runs import NodeState, RunStatus, carrying_out, load_run, update_run
from ratchet.store.store import Store
from tests.support.recorded_run import record


@contextmanager
def answering(answers: dict[str, object]) -> Iterator[str]:
    """A server that knows just these paths; its API's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in answers
            body = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/api"
        running.shutdown()


@pytest.mark.parametrize("version", ["2.20.0", "3.6.9", "4.0.0"])
def test_a_server_of_another_version_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with answering({"/api/health": True, "/api/admin/version": version}) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(UserError) as refused:
            server.find_server()
    assert str(refused.value).startswith(f"the Prefect server at {url} has version {version}, ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", ["3.7.7", "3.8.0", "3.7.8+2.gabc"])
def test_a_server_that_is_not_older_will_do(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with answering({"/api/health": True, "/api/admin/version": version}) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert server.find_server() == url


def test_a_run_is_handed_over_to_the_same_store_and_code_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    conductor = Conductor(store, record(store, ["model"]).run_id, Display([]))
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
        assert find_serving(conductor, url) == good
    for other in others:
        with answering({path: good | other}) as url:
            assert find_serving(conductor, url) is None, other
    with answering({}) as url:
        assert find_serving(conductor, url) is None


def test_the_terminal_shows_what_the_runs_process_recorded(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = record(store, ["model"])
    path = events_file(store, found.run_id)
    path.write_text('{"call": "line", "text": "of an earlier attempt"}\n')
    shown = io.StringIO()
    display = Display(["model"], Console(file=shown, width=100))
    reader = _Reader(path)
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
    follower = _Follower(
        Conductor(store, found.run_id, display), "http://127.0.0.1:9/api", "x", reader
    )
    assert follower.follow() == 2
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
    conductor = Conductor(store, found.run_id, Display(["model"], Console(file=shown, width=100)))
    reader = _Reader(events_file(store, found.run_id))
    assert _Follower(conductor, "http://127.0.0.1:9/api", "x", reader).follow() == 1
    assert "its process died in 'model'; the same command continues there" in shown.getvalue()
