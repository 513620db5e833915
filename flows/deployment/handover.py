"""Handing a run over to the served deployments, and following it in the terminal.

The process that carries a run out writes what it would show into the run's folder; the terminal
reads it from there and shows the same as if it ran the stages itself (`flows.execution.events`).
The server is only asked to start the run, to cancel it on Ctrl-C, and how it ended. Prefect isn't
imported here: `ratchet run` shows something at once, and takes next to no memory while it waits.
"""

from __future__ import annotations

import time
from typing import Any

from flows.deployment.serve import RECORDED, served_from
from flows.execution.events import events_file
from flows.execution.executor import RunExecutor
from flows.execution.terminal import at_ctrl_c
from flows.pages.markdown import RUN_PATH
from flows.server import server
from ratchet.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from ratchet.store.runs import RunStatus, load_run
from tasks.runtime.launch import EventFile

READ_SECONDS = 0.2
ASK_SECONDS = 2.0
PATIENCE_SECONDS = 20.0
"""A run that nobody started for this long, and that nobody looks after, is taken back."""
EXIT_BY_STATE = {
    "COMPLETED": 0,
    "FAILED": EXIT_USER_ERROR,
    "CANCELLED": EXIT_INTERRUPTED,
    "CRASHED": 1,
}
"""Exit code by the type of a flow run's final state."""


def flow_name(executor: RunExecutor) -> str:
    """Which flow carries the run out."""
    if executor.is_whole_run:
        return "full"
    return "audit" if executor.record.targets == ["audit"] else "stage"


def find_serving(executor: RunExecutor, api_url: str) -> dict[str, Any] | None:
    """The served deployment that can carry the run out: this code, on this machine, with this
    store."""
    found = server.served_deployment(api_url, f"{flow_name(executor)}/{RECORDED}")
    if found is None or found["version"] != served_from():
        return None
    return found if found["parameters"].get("store") == str(executor.store.root) else None


def hand_over(executor: RunExecutor, api_url: str, deployment: dict[str, Any]) -> int | None:
    """Have the deployment carry the run out and follow it; the exit code, or None when nobody
    started it."""
    run_id = executor.record.run_id
    events = EventFile.from_now(events_file(executor.store, run_id))
    flow_run = server.post(
        f"{api_url}/deployments/{deployment['id']}/create_flow_run",
        {
            "name": run_id,
            "idempotency_key": run_id,  # asked twice, started once
            "parameters": {"store": str(executor.store.root), "run_id": run_id},
            "state": {"type": "SCHEDULED"},
        },
    )
    page = f"{api_url.removesuffix('/api')}{RUN_PATH}/{flow_run['id']}"
    executor.display.line(f"[dim]run by `ratchet ui`; Ctrl-C cancels it. {page}[/]")
    return Follower(executor, api_url, flow_run["id"], events).follow()


class Follower:
    """Shows a run that another process carries out."""

    def __init__(
        self, executor: RunExecutor, api_url: str, flow_run_id: str, events: EventFile
    ) -> None:
        self._executor = executor
        self._api_url = api_url
        self._url = f"{api_url}/flow_runs/{flow_run_id}"
        self._events = events
        self._began = time.monotonic()

    def follow(self) -> int | None:
        """Show the run until it ends; the exit code, or None when nobody started it."""
        asked = 0.0
        try:
            with at_ctrl_c(self._cancel):
                while True:
                    if (code := self._show_news()) is not None:
                        return code
                    if time.monotonic() - asked >= ASK_SECONDS:
                        asked = time.monotonic()
                        state = self._state()
                        if state in EXIT_BY_STATE:
                            return self._ended(state)
                        if state == "SCHEDULED" and self._is_forgotten():
                            self._cancel()
                            return None
                    time.sleep(READ_SECONDS)
        except KeyboardInterrupt:
            self._executor.display.line("left; the run is being cancelled")
            return EXIT_INTERRUPTED

    def _show_news(self) -> int | None:
        """Show what the run's process wrote; the exit code once it is there."""
        for event in self._events.new():
            call = event.pop("call")
            if call == "exit":
                return event["code"]
            getattr(self._executor.display, call)(**event)
        return None

    def _state(self) -> str:
        """The flow run's state type; when the server doesn't answer, what the record says."""
        try:
            return server.read(self._url)["state"]["type"]
        except OSError:
            status = load_run(self._executor.store, self._executor.record.run_id).status
            return "CRASHED" if status is RunStatus.DIED else status.upper()

    def _ended(self, state: str) -> int:
        """The exit code of a run that ended without its process saying so."""
        time.sleep(READ_SECONDS)
        if (code := self._show_news()) is not None:
            return code
        record = load_run(self._executor.store, self._executor.record.run_id)
        self._executor.display.line(record.message or f"the run ended as {state.lower()}")
        return EXIT_BY_STATE[state]

    def _is_forgotten(self) -> bool:
        """Whether nobody started the run and nobody will."""
        if time.monotonic() - self._began < PATIENCE_SECONDS:
            return False
        return find_serving(self._executor, self._api_url) is None

    def _cancel(self) -> None:
        """Ask the server to cancel the run."""
        self._executor.display.line(
            "stopping; what is done stays (Ctrl-C again to leave without waiting)"
        )
        try:
            server.post(f"{self._url}/set_state", {"state": {"type": "CANCELLING"}})
        except OSError as error:
            self._executor.display.line(f"the server doesn't answer: {error}")
