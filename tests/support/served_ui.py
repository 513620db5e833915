"""A `ratchet ui` of its own for tests: its processes, its API, runs that go through it. Not a test
module."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.server import server
from ratchet.store.runs import RunRecord
from ratchet.store.store import Store
from tasks.runtime.supervisor import free_port
from tests.support.recorded_run import environment, run_arguments, start

START_SECONDS = 150.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Wait until the condition holds; how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pids_with(text: str) -> list[int]:
    """Processes whose command line holds the text."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and text in command_line(int(entry.name))
    ]


@dataclass
class Ui:
    """A running `ratchet ui`."""

    home: Path
    store: Store
    port: int
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, home: Path, store: Store, port: int | None = None) -> Ui:
        """Start it and wait until it says its address."""
        port = port or free_port()
        arguments = ["--port", str(port), "--store", str(store.root)]
        process = start("flows.deployment.ui", environment(home), *arguments)
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("Prefect UI: "):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        assert f"http://127.0.0.1:{port}" in lines[-1]
        return cls(home, store, port, process)

    def stop(self) -> str:
        """Ctrl-C; what it printed after its address."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=60)
        return output

    def call(self, path: str, body: Any = None) -> Any:
        """Ask the server's API."""
        url = f"http://127.0.0.1:{self.port}/api{path}"
        return server.read(url) if body is None else server.post(url, body)

    def trigger(self, deployment: str, **parameters: Any) -> str:
        """Start a deployment as its form does; the flow run's id."""
        found = self.call(f"/deployments/name/{deployment}")
        path = f"/deployments/{found['id']}/create_flow_run"
        return self.call(path, {"parameters": parameters, "state": {"type": "SCHEDULED"}})["id"]

    def retry(self, flow_run_id: str) -> None:
        """What the UI's Retry does."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        self.call(f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": True})

    def cancel(self, flow_run_id: str) -> None:
        """What the UI's Cancel does."""
        state = {"type": "CANCELLING", "message": "Cancelled from the UI"}
        self.call(f"/flow_runs/{flow_run_id}/set_state", {"state": state})

    def state(self, flow_run_id: str) -> dict[str, Any]:
        """A flow run's state."""
        return self.call(f"/flow_runs/{flow_run_id}")["state"]

    def wait_until_ended(self, flow_run_id: str, seconds: float = 120.0) -> dict[str, Any]:
        """The final state of a flow run."""
        wait_for(
            lambda: self.state(flow_run_id)["type"] in ENDED, seconds, f"{flow_run_id} has ended"
        )
        return self.state(flow_run_id)

    def subflows(self, flow_run_id: str) -> list[dict[str, Any]]:
        """The stages' flow runs of a run, oldest first."""
        wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run_id]}}}
        found = self.call("/flow_runs/filter", wanted)
        return sorted(found, key=lambda run: run["expected_start_time"])

    def open_runs(self) -> list[dict[str, Any]]:
        """Flow runs and task runs that count as running."""
        wanted = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
        return [
            *self.call("/flow_runs/filter", {"flow_runs": wanted}),
            *self.call("/task_runs/filter", {"task_runs": wanted}),
        ]

    def pid_of(self, module: str) -> int:
        """The process of a child, `flows.server.server` or `flows.deployment.serve`."""
        (pid,) = (
            pid
            for pid in pids_with(f"-m {module} ")
            if (f" {self.port} " if module == "flows.server.server" else f" {self.store.root} ")
            in command_line(pid)
            and "tasks.runtime.supervisor" not in command_line(pid)
        )
        return pid

    def run(self, found: RunRecord) -> subprocess.Popen[str]:
        """Carry a recorded run out as `ratchet run` does."""
        return start("flows.run", environment(self.home), *run_arguments(self.store, found))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
