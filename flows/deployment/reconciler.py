"""Keeps the states in the Prefect UI true for runs whose process died before it could report.

The runner reports a served run whose process dies, but not the stage's flow run inside it, and
nobody reports a run started in a terminal. Every few seconds the state reconciler looks at what
counts as running:

- a flow run whose parent has ended gets the parent's end (Crashed, or Cancelled);
- a flow run whose record in the store says that it died, or ended some time ago, gets that end.

It is a thread of `python -m flows.deployment.serve`, so it works wherever deployments are served.
For runs on machines that share no store there is an automation on missing heartbeats
(`flows.deployment.automation`).
"""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelled, Crashed

from ratchet.store.runs import RunRecord, RunStatus, all_runs
from ratchet.store.store import Store

LOOK_SECONDS = 10.0
SETTLED = timedelta(seconds=30)
"""A run's own process reports its end within this time of writing it down."""
OPEN = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]

logger = logging.getLogger(__name__)


def start(store: Path) -> None:
    """Look after the runs of a store as long as this process lives."""
    threading.Thread(
        target=_look_after, args=(Store(store),), name="state reconciler", daemon=True
    ).start()


def _look_after(store: Store) -> None:
    pause = threading.Event()
    while True:
        try:
            with get_client(sync_client=True) as client:
                reconcile(client, store)
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            logger.warning("the server doesn't answer: %s", error)
        pause.wait(LOOK_SECONDS)


def reconcile(client: SyncPrefectClient, store: Store) -> None:
    """Set the state of every flow run that counts as running and isn't."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN))
        )
    )
    records: dict[str, RunRecord] = {}
    if any(run.parent_task_run_id is None for run in found):
        records = {
            run.prefect_flow_run_id: run for run in all_runs(store) if run.prefect_flow_run_id
        }
    for run in found:
        if run.parent_task_run_id is None:
            end = _end_by_record(run, records.get(str(run.id)))
        else:
            end = _end_by_parent(client, run)
        if end is not None:
            logger.info("flow run %s is set to %s: %s", run.name, end.name, end.message)
            _end(client, run, end)


def _end_by_record(run: FlowRun, record: RunRecord | None) -> State[Any] | None:
    """How a top-level flow run ended, as the store tells; None while it may still be running."""
    if record is None or record.status in (RunStatus.PLANNED, RunStatus.RUNNING):
        return None
    if record.finished_at is not None:
        ended = datetime.fromisoformat(record.finished_at)
        if datetime.now(UTC) - ended < SETTLED:
            return None
    cancelled = run.state is not None and run.state.type is StateType.CANCELLING
    if cancelled or record.status is RunStatus.CANCELLED:
        return Cancelled(message=record.message)
    message = record.message or f"its process ended without a report; the run {record.status}"
    return Crashed(message=message)


def _end_by_parent(client: SyncPrefectClient, run: FlowRun) -> State[Any] | None:
    """How a stage's flow run ended, as its run's state tells; None while that is open."""
    assert run.parent_task_run_id is not None
    above = client.read_task_run(run.parent_task_run_id).flow_run_id
    (parent,) = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[above] if above else []))
    )
    if parent.state is None or not parent.state.is_final():
        return None
    message = f"the run ended as {parent.state.name} while this stage was running"
    return Cancelled(message=message) if parent.state.is_cancelled() else Crashed(message=message)


def _end(client: SyncPrefectClient, run: FlowRun, end: State[Any]) -> None:
    """Set a flow run's state, and that of its tasks that count as running."""
    client.set_flow_run_state(run.id, end, force=True)
    left = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN), name=None)
        ),
    )
    for task_run in left:
        client.set_task_run_state(task_run.id, end, force=True)
