"""What the flows tell Prefect beside states: artifacts, progress, names and tags, the device slot.

Publishing is a courtesy to the reader: when the server doesn't answer, a stage goes on and a
warning stays in the log. The manifest in the store is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate, GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.concurrency.sync import concurrency
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run

from flows.execution.executor import NodeOutcome, RunExecutor
from flows.pages.run_page import model_name, run_page, summary_line, what_it_does
from flows.pages.stage_page import Links, node_page, shown_artifact
from flows.pages.tables import stage_table
from ratchet.pipeline.plan import PlannedNode
from ratchet.store.runs import NodeState

DEVICE_SLOT = "device"
LEASE_SECONDS = 60.0
"""After a kill -9 the slot is free again once its lease has ended; the least Prefect allows."""
PROGRESS_SECONDS = 3.0
DRAIN_SECONDS = 10.0


@contextmanager
def tolerant(what: str) -> Iterator[None]:
    """Go on without `what` when the server doesn't take it, or when an artifact of older code lacks
    what it shows: no page is worth a stage's hours. Any other error is a fault of ours and ends
    the run; what its stages have made is in the store by then."""
    try:
        yield
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        get_run_logger().warning("%s not published: %s", what, error)
    except (LookupError, TypeError, ValueError):
        get_run_logger().error("%s could not be drawn", what, exc_info=True)


def artifact_name(text: str) -> str:
    """A name that Prefect takes for an artifact: lower case, digits and dashes."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")


class ProgressPage:
    """A progress artifact that follows a stage, updated every few seconds."""

    def __init__(self, run_name: str, node: str) -> None:
        self._key = artifact_name(f"{run_name}-{node}-progress")
        self._node = node
        self._id: UUID | None = None
        self._told = 0.0

    def update(self, event: dict[str, Any]) -> None:
        """Take in a progress event."""
        done, total, now = event["done"], event["total"], time.monotonic()
        if not total or (now - self._told < PROGRESS_SECONDS and done < total):
            return
        self._told = now
        percent = min(100.0 * done / total, 100.0)
        text = f"{self._node}: {done:,} of {total:,} {event['unit']} {event['note']}".strip()
        with tolerant("progress"):
            if self._id is None:
                found = create_progress_artifact(percent, key=self._key, description=text)
                assert isinstance(found, UUID)
                self._id = found
            else:
                update_progress_artifact(self._id, percent, description=text)


def create_device_limit() -> None:
    """Make the limit that lets one stage at a time have the device; kept if it exists."""
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(DEVICE_SLOT)
        except ObjectNotFound:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=DEVICE_SLOT, limit=1)
            )


@contextmanager
def device_slot() -> Iterator[None]:
    """Hold the device slot on a server that several runs share."""
    with concurrency(
        DEVICE_SLOT,
        occupy=1,
        strict=True,
        lease_duration=LEASE_SECONDS,
        raise_on_lease_renewal_failure=False,
    ):
        yield


def send_what_is_queued() -> None:
    """Return once the server has the logs and events that are sent in the background; before a
    private server ends."""
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=DRAIN_SECONDS)


def run_title(executor: RunExecutor) -> str:
    """Name of a flow run: the run's id, which stages if not all, and what it does."""
    record = executor.record
    some = "" if executor.is_whole_run else f" {', '.join(record.targets[:3])}:"
    return f"{record.run_id}{some} {what_it_does(executor.config)}"


def run_tags(executor: RunExecutor) -> list[str]:
    """Tags by which a person finds a run."""
    config = executor.config
    sources = sorted({source.label for source in config.questions.train})
    preset = executor.record.preset
    return [
        f"run:{config.name}",
        *([] if preset is None else [f"preset:{preset}"]),
        f"model:{model_name(config)}",
        f"algo:{config.grpo.algorithm}",
        f"warmstart:{config.warmstart.method}",
        *(f"data:{source}" for source in sources),
    ]


def _known(flow_run_ids: set[str]) -> frozenset[str]:
    """Those of the flow runs that the server has."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(one) for one in flow_run_ids]))
    with get_client(sync_client=True) as client:
        return frozenset(str(run.id) for run in client.read_flow_runs(flow_run_filter=wanted))


def _forms() -> dict[str, str]:
    """Deployments that `flows.deployment.serve` serves on this server."""
    ours = FlowFilter(name=FlowFilterName(any_=["full", "stage"]))
    with get_client(sync_client=True) as client:
        flows = {one.id: one.name for one in client.read_flows(flow_filter=ours)}
        found = client.read_deployments(flow_filter=ours)
        return {f"{flows[one.flow_id]}/{one.name}": str(one.id) for one in found}


class RunPages:
    """What a run publishes: its own page, kept up to date, and a page and a table per stage."""

    def __init__(self, executor: RunExecutor) -> None:
        self._executor = executor
        self._links = Links()
        self._id: UUID | None = None
        self.tags = run_tags(executor)

    def begin(self) -> None:
        """Name and tag the run's flow run, and publish the first version of its page; call inside
        the flow run."""
        with tolerant("name and tags"), get_client(sync_client=True) as client:
            client.update_flow_run(
                UUID(flow_run.id),
                name=run_title(self._executor),
                tags=sorted({*flow_run.tags, *self.tags}),
            )
        found = (self._executor.artifact(one.node.name) for one in self._executor.needed)
        makers = {item.manifest.prefect.get("flow_run_id", "") for item in found if item} - {""}
        with tolerant("links to earlier runs"):
            self._links.known = _known(makers) if makers else frozenset()
        with tolerant("links to forms"):
            self._links.forms = _forms()
        with tolerant("run page"):
            made = create_markdown_artifact(
                run_page(self._executor, self._links),
                key=artifact_name(f"{self._executor.record.name}-run"),
                description=summary_line(self._executor, self._links),
            )
            assert isinstance(made, UUID)
            self._id = made

    def update(self) -> None:
        """Bring the run's page up to date."""
        if self._id is None:
            return
        with tolerant("run page"), get_client(sync_client=True) as client:
            page = run_page(self._executor, self._links)
            words = summary_line(self._executor, self._links)
            client.update_artifact(self._id, ArtifactUpdate(data=page, description=words))

    def stage_begins(self, planned: PlannedNode) -> None:
        """A stage's flow run has begun; call inside it."""
        self._links.here[planned.node.name] = str(flow_run.id)
        if planned.state == "run":
            self.update()

    def stage_ended(self, planned: PlannedNode, outcome: NodeOutcome) -> None:
        """Publish the stage's page and table; call inside its flow run."""
        executor, name = self._executor, planned.node.name
        key = artifact_name(f"{executor.record.name}-{name}")
        with tolerant(f"page of {name}"):
            create_markdown_artifact(
                node_page(executor, planned, outcome, self._links),
                key=key,
                description=f"{name} of {executor.record.run_id}: {outcome.state}",
            )
        artifact = shown_artifact(executor, outcome)
        if artifact is not None:
            with tolerant(f"table of {name}"):
                create_table_artifact(
                    stage_table(artifact), key=f"{key}-table", description=f"figures of {name}"
                )
        if outcome.state is not NodeState.REUSED:  # of those the next update tells
            self.update()
