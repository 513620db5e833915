"""What a run shows while it goes on, and the file by which a terminal elsewhere follows it.

A run shows itself to an `Audience`: the terminal (`flows.execution.terminal`), or a file in the
run's folder when `ratchet ui` carries it out. There each call is an event on a line (`Recorder`),
and the terminal that handed the run over makes the same calls (`flows.deployment.handover`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

from ratchet.store.runs import run_folder
from ratchet.store.store import Store
from tasks.runtime.launch import Event

PROGRESS_SECONDS = 0.5
"""Progress is written down no more often than this: nobody reads faster."""


class Audience(Protocol):
    """Whom a run shows itself to."""

    def line(self, text: str) -> None:
        """A line of its own."""

    def begin(self, name: str) -> None:
        """A stage starts."""

    def update(self, event: Event) -> None:
        """An event of the running stage."""

    def end(self, state: str, key: str, detail: str) -> None:
        """The running stage ended as `state`; `detail` says more."""


def events_file(store: Store, run_id: str) -> Path:
    """Where a run's process writes what it shows."""
    return run_folder(store, run_id) / "shown.jsonl"


class Recorder:
    """An audience that writes everything to a file, and at the end the exit code."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._told = 0.0

    def line(self, text: str) -> None:
        """A line of its own."""
        self._write(call="line", text=text)

    def begin(self, name: str) -> None:
        """A stage starts."""
        self._write(call="begin", name=name)

    def update(self, event: Event) -> None:
        """An event of the running stage."""
        if event["event"] == "progress":
            now = time.monotonic()
            if now - self._told < PROGRESS_SECONDS and event["done"] < event["total"]:
                return
            self._told = now
        self._write(call="update", event=event)

    def end(self, state: str, key: str, detail: str) -> None:
        """The running stage ended as `state`; `detail` says more."""
        self._write(call="end", state=state, key=key, detail=detail)

    def exit(self, code: int) -> None:
        """The run has ended with this exit code."""
        self._write(call="exit", code=code)

    def _write(self, **call: Any) -> None:
        self._file.write(json.dumps(call) + "\n")
