"""Shards made by several processes or Ray actors are those that one process makes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.config.load import load_config
from ratchet.config.run import WorkersConfig
from ratchet.errors import UserError
from ratchet.pipeline.plan import make_plan
from ratchet.store.store import Store
from tasks.runtime.context import StageContext
from tasks.runtime.supervisor import descendants
from tasks.sampling import workers
from tasks.sampling.progress import Progress
from tasks.sampling.ray_workers import RayWorker, make_on_ray
from tasks.sampling.sample import Sampled, sample_shards
from tasks.sampling.shards import Shard, plan_shards
from tasks.sampling.workers import Work
from tests.conftest import REPO
from tests.tasks.sampling.test_shards import ALONE, MODEL, SAMPLER, request, rows, stage_context

TWO = WorkersConfig(count=2)
QUESTIONS = rows(6)
WANTED = request(QUESTIONS, shard_questions=2)
NUM_SHARDS = 6


def sample(ctx: StageContext, workers: WorkersConfig, **settings: Any) -> Sampled:
    sampler = SAMPLER.model_copy(update=settings)
    (found,) = sample_shards(ctx, [WANTED], model_config=MODEL, sampler=sampler, workers=workers)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    """What one process makes."""
    return sample(stage_context(tmp_path_factory.mktemp("alone"), "a", QUESTIONS), ALONE)


def test_workers_change_no_key() -> None:
    store = Store(Path("none"))
    one, two = (
        make_plan(load_config("demo", [f"workers.count={count}"]), store) for count in (1, 2)
    )
    assert [node.key for node in one.nodes] == [node.key for node in two.nodes]
    assert one.named("presample").sections["workers"] == {"count": 1, "ray": None}


def test_progress_counts_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tasks.sampling.progress.time.monotonic", lambda: now[0])
    events: list[dict[str, Any]] = []
    ctx = replace(stage_context(tmp_path, "a", QUESTIONS), emit=events.append)
    progress = Progress(ctx, num_total=100, num_reused=20)
    progress.tell(1, 0, 0)
    now[0] = 110.0
    progress.tell(1, 8, 700)
    progress.tell(2, 2, 300)  # told only by the next: there is one line a second
    progress.finish(1, 10, 900)  # 12 completions of 80 in 10 s, and 1,200 tokens
    assert events[-1]["done"] == 32
    assert events[-1]["note"] == "120 tok/s, 57 s left"
    progress.drop(2)
    progress.finish(1, 40, 0)  # made by another run
    assert (events[-1]["done"], events[-1]["total"]) == (70, 100)
    assert events[-1]["note"] == "90 tok/s, 30 s left"


def test_more_workers_than_there_is_room_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"workers.count = 999, but this machine has \d+ "):
        sample(stage_context(tmp_path, "a", QUESTIONS), WorkersConfig(count=999))


@pytest.mark.slow
def test_the_shard_of_a_dead_worker_goes_to_another(tmp_path: Path, alone: Sampled) -> None:
    messages: list[str] = []

    def kill_at_first_progress(event: dict[str, Any]) -> None:
        messages.append(event.get("message", ""))
        victims = [pid for pid in descendants(os.getpid()) if is_worker(pid)]
        if event["event"] == "progress" and len(victims) == 2:
            os.kill(victims[0], signal.SIGKILL)

    ctx = replace(stage_context(tmp_path, "a", QUESTIONS), emit=kill_at_first_progress)
    assert sample(ctx, TWO).table == alone.table
    (said,) = [message for message in messages if "ended" in message]
    assert "ended by signal 9 (out of memory?); its shard goes to another" in said


@pytest.mark.slow
def test_the_stage_fails_with_the_last_worker_and_says_how_it_ended(tmp_path: Path) -> None:
    def kill_all(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            for pid in filter(is_worker, descendants(os.getpid())):
                os.kill(pid, signal.SIGKILL)

    ctx = replace(stage_context(tmp_path, "a", QUESTIONS), emit=kill_all)
    with pytest.raises(RuntimeError) as error:
        sample(ctx, TWO)
    assert str(error.value).count("ended by signal 9") == 2
    assert "missing shards are finished and kept: the same command continues" in str(error.value)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_workers_that_die_together_end_the_stage_also_where_one_was_idle(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path, "a", QUESTIONS)
    work, shard = without_store(ctx, tmp_path)
    pool = workers._Pool(work, {"key": shard}, Progress(ctx, shard.num_completions, 0))
    pool.processes = [workers._Process(work, number, None) for number in (1, 2)]
    for process in pool.processes:
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.join()
    with pytest.raises(RuntimeError, match=r"ended by signal 9.*ended by signal 9.*0 of 1 missing"):
        pool.run()


@pytest.mark.slow
def test_a_worker_s_mistake_is_the_stage_s(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path, "a", QUESTIONS)
    with pytest.raises(UserError, match=r"sampling worker \d: the longest prompt and sampler"):
        sample(ctx, TWO, max_completion_tokens=10_000)


def is_worker(pid: int) -> bool:
    """Whether a process is one that `multiprocessing` spawned for us."""
    return b"spawn_main" in command_line(pid)


def command_line(pid: int) -> bytes:
    """How a process was started; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


STAGE = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.tasks.sampling.test_workers import QUESTIONS, TWO, sample, stage_context
if __name__ == "__main__":
    sample(stage_context(Path(sys.argv[1]), "killed", QUESTIONS), TWO)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_stage_and_two_finish_as_one_would(
    tmp_path: Path, alone: Sampled
) -> None:
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        cwd=REPO,
        env=environment,
    )
    samples = tmp_path / "store" / "samples"
    deadline = time.monotonic() + 300
    while not list(samples.glob("*/manifest.json")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    below = descendants(process.pid)
    assert len(below) >= 2
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    events: list[dict[str, Any]] = []
    ctx = replace(stage_context(tmp_path, "again", QUESTIONS), emit=events.append)
    again = sample(ctx, TWO)
    assert again.table == alone.table
    assert (again.num_shards, again.num_reused > 0) == (NUM_SHARDS, True)
    messages = [event["message"] for event in events if event["event"] == "log"]
    assert messages.count("loading the model into transformers") == 2
    progress = [event for event in events if event["event"] == "progress"]
    assert (progress[-1]["done"], progress[-1]["total"]) == (24, 24)
    assert not list(filter(is_worker, descendants(os.getpid())))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed")
def test_ray_actors_make_what_one_process_makes(tmp_path: Path, alone: Sampled) -> None:
    """One of them is killed when the first shard is finished."""
    killed: list[int] = []

    def kill_one(event: dict[str, Any]) -> None:
        if event["event"] == "progress" and event["done"] and not killed:
            actors = [pid for pid in descendants(os.getpid()) if is_busy_actor(pid)]
            os.kill(actors[0], signal.SIGKILL)
            killed.append(actors[0])

    ctx = replace(stage_context(tmp_path, "a", QUESTIONS), emit=kill_one)
    found = sample(ctx, WorkersConfig(count=2, ray="local"))
    assert killed
    assert found.table == alone.table
    assert found.num_shards == NUM_SHARDS


def without_store(ctx: StageContext, folder: Path) -> tuple[Work, Shard]:
    """A shard, and work whose model lies where no Ray node sees it."""
    model = replace(ctx.inputs["model"], folder=folder / "elsewhere")
    ctx = replace(ctx, inputs={**ctx.inputs, "model": model})
    shard = plan_shards(WANTED, [(1,)] * len(QUESTIONS))[0]
    return Work(ctx, MODEL, SAMPLER, 1), shard


def test_a_node_without_the_store_is_told_by_the_shard_and_not_by_the_actor(tmp_path: Path) -> None:
    work, shard = without_store(stage_context(tmp_path, "a", QUESTIONS), tmp_path)
    worker = RayWorker(work, "1")  # an error here would only be an actor that died
    with pytest.raises(UserError, match=r"^a Ray node doesn't see .*elsewhere: put the store"):
        worker.make("key", shard)


def heard_outside(pid: int) -> list[str]:
    """Addresses beyond loopback that a process listens to."""
    return [
        found.laddr.ip
        for found in psutil.Process(pid).net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
        and not found.laddr.ip.removeprefix("::ffff:").startswith("127.")
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed")
def test_ray_of_our_own_is_heard_on_loopback_only_and_a_missing_store_is_one_line(
    tmp_path: Path,
) -> None:
    heard: list[list[str]] = []

    def listen(event: dict[str, Any]) -> None:
        if "on Ray" in event.get("message", ""):
            below = descendants(os.getpid())
            assert any("gcs_server" in psutil.Process(pid).name() for pid in below)
            heard.append([one for pid in (os.getpid(), *below) for one in heard_outside(pid)])

    ctx = replace(stage_context(tmp_path, "a", QUESTIONS), emit=listen)
    work, shard = without_store(ctx, tmp_path)
    progress = Progress(ctx, num_total=shard.num_completions, num_reused=0)
    with pytest.raises(UserError, match=r"^a Ray node doesn't see .*elsewhere: put the store"):
        make_on_ray(work, {"key": shard}, progress, WorkersConfig(ray="local"))
    assert heard == [[]]


def is_busy_actor(pid: int) -> bool:
    """Whether a process is a Ray actor that makes a shard."""
    return b"ray::RayWorker.make" in command_line(pid)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_ray_is_asked_for_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="install the extra 'ray'"):
        sample(stage_context(tmp_path, "a", QUESTIONS), WorkersConfig(ray="auto"))
