"""Run one job in a worker process and hear what it says, from the flow's side.

The worker's standard output carries events, one JSON object a line; all else it and its libraries
print goes to the job's log file. Where events go through a file, `EventFile` reads them. Whatever
happens here, an exception or a signal included, no process stays behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ratchet.errors import EXIT_USER_ERROR
from ratchet.store.store import write_durably
from tasks.runtime.job import Job
from tasks.runtime.supervisor import SIGNAL_EXIT, Supervised, by_signal

Event = dict[str, Any]
GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""GPUs are numbered by their place on the bus, as `nvidia-smi` and the memory check number them;
CUDA's own default is by speed. What the user has set wins."""


class WorkerState(StrEnum):
    """How a worker ended."""

    BUILT = "built"
    REUSED = "reused"
    USER_ERROR = "user_error"
    CRASHED = "crashed"
    STOPPED = "stopped"
    REFUSED = "refused"


@dataclass(frozen=True)
class WorkerOutcome:
    """What became of a job."""

    state: WorkerState
    message: str = ""
    """What went wrong, one line."""
    summary: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class StopRequest:
    """A wish to stop that may come from a signal handler at any moment."""

    def __init__(self) -> None:
        self.wanted = False
        self._worker: Supervised | None = None

    def __call__(self) -> None:
        """Stop: the running worker now, and everything that asks later."""
        self.wanted = True
        if self._worker is not None:
            self._worker.stop()

    def watch(self, worker: Supervised | None) -> None:
        """The worker that a stop ends; at once if a stop is wanted already."""
        self._worker = worker
        if self.wanted and worker is not None:
            worker.stop()


@dataclass
class EventFile:
    """Events in a file that grows, and that may not exist yet; those before `offset` are old."""

    path: Path
    offset: int = 0

    @classmethod
    def from_now(cls, path: Path) -> EventFile:
        """Leave out what is there already."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def new(self) -> Iterator[Event]:
        """Events that were not told yet; a line that is still being written waits."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                yield json.loads(line)


def _outcome_without_last_word(code: int, job: Job) -> WorkerOutcome:
    """A worker that ended without saying how."""
    if code > SIGNAL_EXIT:
        what = f"its process was ended {by_signal(code - SIGNAL_EXIT)}"
    else:
        what = f"its process ended with code {code} before the stage did"
    return WorkerOutcome(WorkerState.CRASHED, f"{what}; see {job.log_file}")


def _outcome(last: Event, code: int, job: Job) -> WorkerOutcome:
    if last.get("event") == "done":
        return WorkerOutcome(WorkerState(last["state"]), "", last["summary"], last["seconds"])
    if last.get("event") == "error":
        state = WorkerState.USER_ERROR if code == EXIT_USER_ERROR else WorkerState.CRASHED
        return WorkerOutcome(state, last["message"])
    return _outcome_without_last_word(code, job)


def run_supervised(
    job: Job, on_event: Callable[[Event], None], stop: StopRequest | None = None
) -> WorkerOutcome:
    """Run `job` in a process of its own and wait for it; `on_event` hears log, progress and
    waiting events as they come."""
    stop = stop or StopRequest()
    job.log_file.parent.mkdir(parents=True, exist_ok=True)
    job_file = job.log_file.with_suffix(".job.json")
    write_durably(job_file, job.model_dump_json(indent=2) + "\n")
    last: Event = {}
    command = [sys.executable, "-m", "tasks.runtime.worker", str(job_file.absolute())]
    with (
        job.log_file.open("ab") as log,
        Supervised(
            command, stdout=subprocess.PIPE, stderr=log, environment=GPU_ORDER | os.environ
        ) as worker,
    ):
        stop.watch(worker)
        try:
            for line in worker.stdout:
                if not line.endswith(b"\n"):
                    break  # cut off by a kill
                last = json.loads(line)
                if last["event"] not in ("done", "error"):
                    on_event(last)
            code = worker.wait()
        finally:
            stop.watch(None)
    outcome = _outcome(last, code, job)
    finished = outcome.state in (WorkerState.BUILT, WorkerState.REUSED)
    return WorkerOutcome(WorkerState.STOPPED) if stop.wanted and not finished else outcome
