"""Runs as processes, without a lasting server: stopped, killed, continued."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from ratchet.store.runs import RunStatus, load_run
from ratchet.store.store import Store
from tasks.runtime.supervisor import descendants
from tests.support.recorded_run import environment, record, run_arguments, start, states
from tests.support.served_ui import is_alive, wait_for

pytestmark = pytest.mark.slow

# Long enough for a signal to come while the stage runs.
LONG = 'questions.train=[{kind="symbolic", count=30000, seed=1}]'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Prefect home that the module's processes share."""
    return tmp_path_factory.mktemp("prefect")


def started_run(store: Store, home: Path, *settings: str) -> tuple[str, subprocess.Popen[str]]:
    """A run that is inside its 'questions' stage."""
    found = record(store, ["questions"], *settings)
    process = start("flows.run", environment(home), *run_arguments(store, found))
    wait_for(lambda: list(store.root.glob("questions/.work-*")) != [], 120, "the stage starts")
    return found.run_id, process


def test_without_a_server_then_all_reused_without_prefect(store: Store, home: Path) -> None:
    first = record(store, ["questions"])
    process = start("flows.run", environment(home), *run_arguments(store, first))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert [line.split()[:2] for line in output.splitlines() if "done" in line] == [
        ["model", "done"],
        ["questions", "done"],
    ]
    assert (home / "prefect.db").is_file()
    assert "Error" not in output

    elsewhere = home / "unused"
    second = record(store, ["questions"])
    process = start("flows.run", environment(elsewhere), *run_arguments(store, second))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert [line.split()[:2] for line in output.splitlines()] == [
        ["model", "reused"],
        ["questions", "reused"],
    ]
    assert not (elsewhere / "prefect.db").exists()
    assert load_run(store, second.run_id).status is RunStatus.COMPLETED


def test_ctrl_c_stops_in_good_order_and_the_same_run_continues(store: Store, home: Path) -> None:
    run_id, process = started_run(store, home, LONG)
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "questions  stopped" in output and "Traceback" not in output
    assert [pid for pid in below if is_alive(pid)] == []
    after = load_run(store, run_id)
    assert after.status is RunStatus.CANCELLED
    assert states(after) == {"model": "done", "questions": "failed"}

    again = record(store, ["questions"], LONG)
    process = start("flows.run", environment(home), *run_arguments(store, again))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert states(load_run(store, again.run_id)) == {"model": "reused", "questions": "done"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_run_leaves_no_process(store: Store, home: Path, number: signal.Signals) -> None:
    run_id, process = started_run(store, home, LONG)
    below = descendants(process.pid)
    # Worker and server, each under its supervisor.
    assert len(below) >= 4
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_for(lambda: not any(map(is_alive, below)), 10, "all processes end")
    assert list(store.root.glob("questions/[!.]*")) == []
    # SIGTERM lets the run say so; after SIGKILL its lock is free, which says the same.
    after = load_run(store, run_id)
    assert after.status is RunStatus.DIED
    assert states(after) == {"model": "done", "questions": "failed"}
    assert ("SIGTERM" in after.message) == (number is signal.SIGTERM)


def test_unreachable_server_is_one_line(store: Store, home: Path) -> None:
    found = record(store, ["model"])
    env = environment(home, PREFECT_API_URL="http://127.0.0.1:9/api")
    process = start("flows.run", env, *run_arguments(store, found))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.startswith("error: no Prefect server answers at http://127.0.0.1:9/api")
    assert len(output.splitlines()) == 1
    after = load_run(store, found.run_id)
    assert after.status is RunStatus.FAILED and "no Prefect server answers" in after.message
