"""Handing a run over to the served deployments, and following it in the terminal.

The process that carries a run out writes what it would show into the run's folder (`Recorder`);
the terminal reads it from there and shows the same as if it ran the stages itself (`follow`). The
server is only asked to start the run, to cancel it on Ctrl-C, and how it ended. Prefect isn't
imported here: `ratchet run` shows something at once, and takes next to no memory while it waits.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.deployment.serve import RECORDED, served_from
from flows.execution.executor import Conductor
from flows.pages.markdown import RUN_PATH
from flows.server import server
from ratchet.store.runs import RunStatus, load_run, run_folder
from ratchet.store.store import Store

EVENTS = "shown.jsonl"
PROGRESS_SECONDS = 0.5
READ_SECONDS = 0.2
ASK_SECONDS = 2.0
PATIENCE_SECONDS = 20.0
"""A run that nobody started for this long, and that nobody looks after, is taken back."""
EXIT_INTERRUPTED = 130
EXIT_BY_STATE = {"COMPLETED": 0, "FAILED": 2, "CANCELLED": EXIT_INTERRUPTED, "CRASHED": 1}


def events_file(store: Store, run_id: str) -> Path:
    """Where a run's process writes what it shows."""
    return run_folder(store, run_id) / EVENTS


class Recorder:
    """Writes what a run shows to a file, for terminals that follow it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._told = 0.0

    def line(self, text: str) -> None:
        """A line of its own."""
        self._write(call="line", text=text)

    def begin(self, name: str) -> None:
        """A stage starts."""
        self._write(call="begin", name=name)

    def update(self, event: dict[str, Any]) -> None:
        """An event of the running stage; progress not more often than a reader looks."""
        now = time.monotonic()
        if event["event"] == "progress":
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

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")


class _Reader:
    """Reads whole lines from a file that grows, and that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """What was written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def _counting_ctrl_c() -> Iterator[list[int]]:
    """A list that grows with each Ctrl-C."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def flow_name(conductor: Conductor) -> str:
    """Which flow carries the run out."""
    if conductor.is_whole_run:
        return "full"
    return "audit" if conductor.record.targets == ["audit"] else "stage"


def find_serving(conductor: Conductor, api_url: str) -> dict[str, Any] | None:
    """The served deployment that can carry the run out: this code, on this machine, with this
    store."""
    found = server.served_deployment(api_url, f"{flow_name(conductor)}/{RECORDED}")
    if found is None or found["version"] != served_from():
        return None
    return found if found["parameters"].get("store") == str(conductor.store.root) else None


def hand_over(conductor: Conductor, api_url: str, deployment: dict[str, Any]) -> int | None:
    """Have the deployment carry the run out and follow it; the exit code, or None when nobody
    started it."""
    run_id = conductor.record.run_id
    reader = _Reader(events_file(conductor.store, run_id))
    flow_run = server.post(
        f"{api_url}/deployments/{deployment['id']}/create_flow_run",
        {
            "name": run_id,
            "idempotency_key": run_id,  # asked twice, started once
            "parameters": {"store": str(conductor.store.root), "run_id": run_id},
            "state": {"type": "SCHEDULED"},
        },
    )
    page = f"{api_url.removesuffix('/api')}{RUN_PATH}/{flow_run['id']}"
    conductor.display.line(f"[dim]run by `ratchet ui`; Ctrl-C cancels it. {page}[/]")
    return _Follower(conductor, api_url, flow_run["id"], reader).follow()


class _Follower:
    """Shows a run that another process carries out."""

    def __init__(
        self, conductor: Conductor, api_url: str, flow_run_id: str, reader: _Reader
    ) -> None:
        self._conductor = conductor
        self._api_url = api_url
        self._url = f"{api_url}/flow_runs/{flow_run_id}"
        self._reader = reader
        self._began = time.monotonic()

    def follow(self) -> int | None:
        """Show the run until it ends; the exit code, or None when nobody started it."""
        asked = 0.0
        heard = 0
        with _counting_ctrl_c() as pressed:
            while True:
                if (code := self._show_news()) is not None:
                    return code
                if len(pressed) > heard:
                    heard = len(pressed)
                    if heard > 1:
                        self._conductor.display.line("left; the run is being cancelled")
                        return EXIT_INTERRUPTED
                    self._cancel()
                if time.monotonic() - asked >= ASK_SECONDS:
                    asked = time.monotonic()
                    state = self._state()
                    if state in EXIT_BY_STATE:
                        return self._ended(state)
                    if state == "SCHEDULED" and self._is_forgotten():
                        self._cancel()
                        return None
                time.sleep(READ_SECONDS)

    def _show_news(self) -> int | None:
        """Show what the run's process wrote; the exit code once it is there."""
        for item in self._reader.new():
            call = item.pop("call")
            if call == "exit":
                return item["code"]
            getattr(self._conductor.display, call)(**item)
        return None

    def _state(self) -> str | None:
        """The flow run's state type; when the server doesn't answer, what the record says."""
        try:
            return server.read(self._url)["state"]["type"]
        except OSError:
            status = load_run(self._conductor.store, self._conductor.record.run_id).status
            ended = {
                RunStatus.COMPLETED: "COMPLETED",
                RunStatus.FAILED: "FAILED",
                RunStatus.CANCELLED: "CANCELLED",
                RunStatus.DIED: "CRASHED",
            }
            return ended.get(status)

    def _ended(self, state: str) -> int:
        """The exit code of a run that ended without its process saying so."""
        time.sleep(READ_SECONDS)
        if (code := self._show_news()) is not None:
            return code
        record = load_run(self._conductor.store, self._conductor.record.run_id)
        self._conductor.display.line(record.message or f"the run ended as {state.lower()}")
        return EXIT_BY_STATE[state]

    def _is_forgotten(self) -> bool:
        """Whether nobody started the run and nobody will."""
        if time.monotonic() - self._began < PATIENCE_SECONDS:
            return False
        return find_serving(self._conductor, self._api_url) is None

    def _cancel(self) -> None:
        """Ask the server to cancel the run."""
        self._conductor.display.line(
            "stopping; what is done stays (Ctrl-C again to leave without waiting)"
        )
        try:
            server.post(f"{self._url}/set_state", {"state": {"type": "CANCELLING"}})
        except OSError as error:
            self._conductor.display.line(f"the server doesn't answer: {error}")
