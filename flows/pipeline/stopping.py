"""How a flow learns that it shall stop, besides Ctrl-C in a run's own process.

Ctrl-C, a cancel in the Prefect UI, and SIGTERM all end the running worker and let the run finish in
good order: the stage's flow run, the run and its record say what happened, and the lock is free.

*A cancel in the UI* reaches a served run as SIGTERM from the runner, which Prefect turns into
`TerminationSignal`; a run that no runner looks after has to watch for it, which
`watching_for_cancel` does. *SIGTERM* that nobody asked Prefect for (the serving ends, the machine
shuts down) looks the same from inside, so `cancel_is_wanted` asks the server which it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError

from flows.execution.executor import RunExecutor

WATCH_SECONDS = 3.0


def cancel_is_wanted(flow_run_id: str | None) -> bool:
    """Whether somebody cancelled the flow run; False when the server doesn't say."""
    if flow_run_id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
    except (httpx.HTTPError, PrefectHTTPStatusError):
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


@contextmanager
def watching_for_cancel(executor: RunExecutor) -> Iterator[None]:
    """Stop the worker once the flow run is cancelled in the UI; for runs without a runner."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            if cancel_is_wanted(executor.record.prefect_flow_run_id):
                executor.halt("cancelled in the Prefect UI")
                return

    thread = threading.Thread(target=watch, name="watch for cancel", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
