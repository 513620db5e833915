"""Run records: which artifacts belong to a run and how far it got.

A run is a folder `runs/<run_id>/` in the store with its resolved configuration, the state of each
node and a log per node. Records describe; the artifacts' manifests decide what exists.

Who carries a run out holds its lock (`carrying_out`), which goes with the process. A record that
says `running` while nobody holds the lock is read as `died`: a process that is killed can't write
how it ended.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ratchet.errors import UserError
from ratchet.store.lock import hold, is_held
from ratchet.store.store import RUNS, Store, write_durably

MEASUREMENTS = frozenset({"benchmark", "audit"})
"""Nodes that measure and lead nowhere: a run of nothing else isn't what 'latest' goes on from."""
RECORD = "run.json"
CONFIG = "config.json"


class NodeState(StrEnum):
    """How far a node is."""

    PENDING = "pending"
    RUNNING = "running"
    REUSED = "reused"
    DONE = "done"
    FAILED = "failed"
    STALE = "stale"
    """Made by an earlier run from inputs that this one replaces, and not asked for in this one."""


class RunStatus(StrEnum):
    """How far a run is."""

    PLANNED = "planned"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DIED = "died"


class NodeRecord(BaseModel):
    """One node of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    key: str
    state: NodeState = NodeState.PENDING
    seconds: float | None = None
    message: str = ""


class RunRecord(BaseModel):
    """One run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run_id: str
    name: str
    created_at: str
    """UTC, ISO 8601."""
    config: dict[str, Any]
    """The resolved configuration."""
    command: str
    """The command line that asked for it."""
    preset: str | None = None
    """Name of the preset that the settings started from, over any runs between."""
    based_on: str | None = None
    """Run whose configuration this one started from."""
    targets: list[str]
    """Nodes to bring about; their inputs come along."""
    force: list[str] = []
    """Nodes made anew even if they exist."""
    nodes: dict[str, NodeRecord]
    """Every node of the run, in topological order."""
    status: RunStatus = RunStatus.PLANNED
    message: str = ""
    """The verdict, or what stopped the run."""
    prefect_flow_run_id: str | None = None
    finished_at: str | None = None

    def with_node(self, name: str, **changes: Any) -> RunRecord:
        """A copy in which node `name` has other values."""
        node = self.nodes[name].model_copy(update=changes)
        return self.model_copy(update={"nodes": self.nodes | {name: node}})


def now() -> str:
    """The present, UTC, ISO 8601 to the microsecond."""
    return datetime.now(UTC).isoformat()


def new_run_id(name: str) -> str:
    """An id that sorts by time within one name."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def run_folder(store: Store, run_id: str) -> Path:
    """The run's folder."""
    return store.root / RUNS / run_id


def log_file(store: Store, run_id: str, node: str) -> Path:
    """Where a node's worker writes what its libraries print."""
    return run_folder(store, run_id) / "logs" / f"{node}.log"


def update_run(store: Store, record: RunRecord) -> None:
    """Write the record, durably and in one step."""
    write_durably(
        run_folder(store, record.run_id) / RECORD, record.model_dump_json(indent=2) + "\n"
    )


def create_run(store: Store, record: RunRecord) -> None:
    """Make the run's folder with its configuration and record."""
    folder = run_folder(store, record.run_id)
    (folder / "logs").mkdir(parents=True)
    write_durably(folder / CONFIG, json.dumps(record.config, indent=2) + "\n")
    update_run(store, record)


def _lock_file(store: Store, run_id: str) -> Path:
    return run_folder(store, run_id) / "run.lock"


def carrying_out(
    store: Store, run_id: str, on_wait: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Hold the run's lock while carrying it out; `on_wait` is told who does so meanwhile."""
    return hold(_lock_file(store, run_id), on_wait)


def is_carried_out(store: Store, run_id: str) -> bool:
    """Whether a living process carries the run out."""
    return is_held(_lock_file(store, run_id))


def _as_it_is(store: Store, record: RunRecord) -> RunRecord:
    """The record, corrected where its process died before it could write."""
    if record.status is not RunStatus.RUNNING or is_carried_out(store, record.run_id):
        return record
    where = ""
    for name, node in record.nodes.items():
        if node.state is NodeState.RUNNING:
            record = record.with_node(name, state=NodeState.FAILED, message="its process died")
            where = f" in '{name}'"
    message = f"its process died{where}; the same command continues there"
    return record.model_copy(update={"status": RunStatus.DIED, "message": message})


def all_runs(store: Store) -> list[RunRecord]:
    """Every run in the store, newest first."""
    records = [
        _as_it_is(store, RunRecord.model_validate_json(path.read_text(encoding="utf-8")))
        for path in (store.root / RUNS).glob(f"*/{RECORD}")
    ]
    return sorted(records, key=lambda record: record.created_at, reverse=True)


def load_run(store: Store, ref: str) -> RunRecord:
    """The run that `ref` names: a run id, the start of just one, a run's name (its newest), or
    'latest', the newest that did more than measure. UserError when there is none."""
    runs = all_runs(store)
    if not runs:
        raise UserError(f"there are no runs in {store.root}: start one with `ratchet run`")
    if ref == "latest":
        return next((run for run in runs if not set(run.targets) <= MEASUREMENTS), runs[0])
    exact = [run for run in runs if ref in (run.run_id, run.name)]
    if exact:
        return exact[0]
    begun = [run for run in runs if run.run_id.startswith(ref)]
    if len(begun) == 1:
        return begun[0]
    known = ", ".join(run.run_id for run in (begun or runs)[:5])
    problem = "stands for several runs" if begun else "is no run here"
    raise UserError(f"'{ref}' {problem}; the newest are {known} (or say 'latest')")
