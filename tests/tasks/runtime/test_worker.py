"""The worker, run for real on the filter stage: reuse, errors, waiting, and kills at any moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ratchet.store.schemas import read_table
from ratchet.store.store import Store
from ratchet.verifier import close_shared_pool
from tasks.runtime import launch
from tasks.runtime.job import Job
from tasks.runtime.launch import (
    Event,
    EventFile,
    StopRequest,
    WorkerOutcome,
    WorkerState,
    run_supervised,
)
from tasks.runtime.supervisor import Supervised, descendants
from tests.support.made_up_store import commit, filter_inputs, filter_job, read_log, score_rows

RIGHT = {"never": "----", "some": "+-+-", "often": "+++-", "always": "++++"}
ROLES = {"never": "warmup", "some": "rl", "often": "rl", "always": "warmup"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def roles(store: Store, job: Job) -> dict[str, str]:
    """Role by question in the artifact that the job made."""
    artifact = store.get(job.stage, job.key)
    assert store.damage(artifact) is None
    rows = read_table(artifact.folder / "selection.parquet", "selection").to_pylist()
    return {row["question_id"]: row["role"] for row in rows}


def test_a_worker_numbers_gpus_as_nvidia_smi_does(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho $CUDA_DEVICE_ORDER > $(dirname $0)/order\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(script))
    job = filter_job(store, filter_inputs(store, RIGHT))
    for set_by_user, order in ((None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")):
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        if set_by_user is not None:
            monkeypatch.setenv("CUDA_DEVICE_ORDER", set_by_user)
        run(job)
        assert (tmp_path / "order").read_text().strip() == order


def run(job: Job, stop: StopRequest | None = None) -> tuple[WorkerOutcome, list[Event]]:
    events: list[Event] = []
    return run_supervised(job, events.append, stop), events


def in_background(job: Job, stop: StopRequest | None = None) -> tuple[threading.Thread, list]:
    """A thread that runs the job, and the list its outcome and events go to."""
    heard: list = []
    thread = threading.Thread(
        target=lambda: heard.append(run_supervised(job, heard.append, stop)), daemon=True
    )
    thread.start()
    return thread, heard


def wait_for_event(heard: list, kind: str) -> Event:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for event in heard:
            if isinstance(event, dict) and event["event"] == kind:
                return event
        time.sleep(0.02)
    raise AssertionError(f"no {kind} event in {heard}")


def test_builds_once_then_reuses_and_makes_anew_when_forced(store: Store) -> None:
    job = filter_job(store, filter_inputs(store, RIGHT), prefect={"flow_run_id": "f1"})
    built, _ = run(job)
    assert built.state is WorkerState.BUILT
    assert roles(store, job) == ROLES
    manifest = store.get("filter", job.key).manifest
    assert built.summary == manifest.summary
    assert manifest.parents.keys() == {"scores", "questions"}
    assert manifest.prefect == {"flow_run_id": "f1"}
    assert not (store.root / "filter" / f".work-{job.key}").exists()

    reused, _ = run(job)
    assert reused.state is WorkerState.REUSED
    assert store.get("filter", job.key).manifest == manifest

    forced, _ = run(job.model_copy(update={"force": True}))
    assert forced.state is WorkerState.BUILT
    again = store.get("filter", job.key).manifest
    assert again.started_at > manifest.started_at
    assert again.content == manifest.content


def test_damaged_artifact_is_reported_and_made_again(store: Store) -> None:
    job = filter_job(store, filter_inputs(store, RIGHT))
    run(job)
    table = store.get("filter", job.key).folder / "selection.parquet"
    table.write_bytes(table.read_bytes()[:-1] + b"?")
    outcome, events = run(job)
    assert outcome.state is WorkerState.BUILT
    assert "selection.parquet has changed" in events[0]["message"]
    assert roles(store, job) == ROLES


def test_damaged_and_missing_inputs_are_named(store: Store) -> None:
    inputs = filter_inputs(store, RIGHT)
    job = filter_job(store, inputs)
    scores = store.get("score", inputs["scores"].key)
    (scores.folder / "scores.parquet").write_bytes(b"PAR1")
    outcome, _ = run(job)
    assert outcome.state is WorkerState.USER_ERROR
    assert outcome.message.startswith(
        f"input 'scores' ({scores.ref}) is damaged: scores.parquet has 4 bytes, not "
    )
    (scores.folder / "manifest.json").unlink()
    outcome, _ = run(job)
    assert outcome.message.startswith(f"input 'scores' ({scores.ref}) isn't in {store.root}")
    assert store.find("filter", job.key) is None


def test_user_error_is_one_line_and_leaves_no_artifact(store: Store) -> None:
    job = filter_job(store, filter_inputs(store, {"never": "----"}))
    outcome, _ = run(job)
    assert outcome.state is WorkerState.USER_ERROR
    assert outcome.message.startswith("no question")
    assert "Traceback" in read_log(job)
    assert store.find("filter", job.key) is None
    assert [path.name for path in (store.root / "filter").glob(".new-*")] == []


def test_crash_names_the_error_and_the_log(store: Store) -> None:
    inputs = filter_inputs(store, RIGHT)
    # Complete and undamaged as an artifact, but its table is none.
    manifest = store.get("score", inputs["scores"].key).manifest
    with store.build("score", manifest.key) as build:
        (build.out_dir / "scores.parquet").write_bytes(b"no table at all")
        store.commit(build, manifest)
    job = filter_job(store, inputs)
    outcome, _ = run(job)
    assert outcome.state is WorkerState.CRASHED
    assert "ArrowInvalid" in outcome.message and str(job.log_file) in outcome.message
    assert "Traceback" in read_log(job)


def test_waits_for_the_lock_and_says_for_whom(store: Store) -> None:
    job = filter_job(store, filter_inputs(store, RIGHT))
    with store.lock(job.stage, job.key, lambda message: None):
        thread, heard = in_background(job)
        event = wait_for_event(heard, "waiting")
        assert str(os.getpid()) in event["message"]
    thread.join(timeout=20)
    assert heard[-1].state is WorkerState.BUILT


@pytest.fixture
def others() -> set[int]:
    """Children that tests before have left in this process; the verifier's, which come and go,
    are ended."""
    close_shared_pool()
    return set(descendants(os.getpid()))


def test_stop_ends_the_worker_and_counts_as_stopped(store: Store, others: set[int]) -> None:
    job = filter_job(store, filter_inputs(store, RIGHT))
    stop = StopRequest()
    with store.lock(job.stage, job.key, lambda message: None):
        thread, heard = in_background(job, stop)
        wait_for_event(heard, "waiting")
        stop()
        thread.join(timeout=20)
    assert heard[-1].state is WorkerState.STOPPED
    assert set(descendants(os.getpid())) <= others


def test_killed_worker_is_a_crash_that_names_the_signal(store: Store, others: set[int]) -> None:
    job = filter_job(store, filter_inputs(store, RIGHT))
    with store.lock(job.stage, job.key, lambda message: None):
        thread, heard = in_background(job)
        wait_for_event(heard, "waiting")
        supervisor, worker = (pid for pid in descendants(os.getpid()) if pid not in others)
        assert supervisor < worker
        os.kill(worker, signal.SIGKILL)
        thread.join(timeout=20)
    assert heard[-1].state is WorkerState.CRASHED
    assert "signal 9 (out of memory?)" in heard[-1].message


@pytest.mark.slow
def test_killed_at_any_moment_the_rerun_gives_the_same_table(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"q{index}": "+-+-" if index % 3 else "----" for index in range(5_000)}
    job = filter_job(store, filter_inputs(store, many))
    began = time.monotonic()
    run(job.model_copy(update={"key": "00" * 10}))
    whole_seconds = time.monotonic() - began
    expected = store.get("filter", "00" * 10).manifest.content
    seen: list[Supervised] = []

    class Watched(Supervised):
        """Lets the test find the worker's process."""

        def __enter__(self) -> Supervised:
            seen.append(self)
            return super().__enter__()

    monkeypatch.setattr(launch, "Supervised", Watched)
    num_killed = 0
    steps = 6
    for step in range(steps):
        thread, heard = in_background(job.model_copy(update={"force": True}))
        time.sleep(whole_seconds * (step + 0.5) / steps)
        for pid in descendants(seen[-1].pid):
            os.kill(pid, signal.SIGKILL)
        thread.join(timeout=20)
        num_killed += heard[-1].state is WorkerState.CRASHED
        found = store.find("filter", job.key)
        assert found is None or store.damage(found) is None
    assert num_killed >= 2
    outcome, _ = run(job)
    assert outcome.state in (WorkerState.BUILT, WorkerState.REUSED)
    assert store.get("filter", job.key).manifest.content == expected
    left = {path.name for path in (store.root / "filter").iterdir()}
    assert left == {"00" * 10, job.key}


def test_rescored_input_makes_the_artifact_anew(store: Store) -> None:
    inputs = filter_inputs(store, RIGHT)
    job = filter_job(store, inputs)
    run(job)
    commit(store, "score", inputs["scores"].key, {"scores": score_rows(RIGHT | {"some": "----"})})
    outcome, events = run(job)
    assert outcome.state is WorkerState.BUILT
    assert "made from another 'scores'" in events[0]["message"]
    assert roles(store, job)["some"] == "warmup"


def test_events_are_told_once_and_whole(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "events")
    assert list(events.new()) == []
    events.path.write_text('{"a": 1}\n{"b"')
    assert list(events.new()) == [{"a": 1}]
    events.path.write_text('{"a": 1}\n{"b": 2}\n')
    assert list(events.new()) == [{"b": 2}]
    assert list(events.new()) == []
