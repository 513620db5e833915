"""What the flows tell Prefect beside states: artifacts, progress, the device slot, names and tags.

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
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run

from flows.pages import artifact_name
from ratchet.config import RunConfig

DEVICE_SLOT = "device"
LEASE_SECONDS = 60.0
"""After a kill -9 the slot is free again once its lease has ended; the least Prefect allows."""
PROGRESS_SECONDS = 3.0
DRAIN_SECONDS = 10.0


@contextmanager
def tolerant(what: str) -> Iterator[None]:
    """Go on without `what` when the server doesn't take it."""
    try:
        yield
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        get_run_logger().warning("%s not published: %s", what, error)


def publish_page(run_name: str, name: str, markdown: str, description: str) -> None:
    """Publish a Markdown artifact of the present run; its versions gather under one key."""
    with tolerant(f"page of {name}"):
        create_markdown_artifact(
            markdown, key=artifact_name(f"{run_name}-{name}"), description=description
        )


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


def run_tags(config: RunConfig) -> list[str]:
    """Tags by which a person finds a run."""
    model = config.model.path.rstrip("/").rpartition("/")[2]
    sources = sorted({source.label for source in config.questions.train})
    return [
        f"run:{config.name}",
        f"model:{model}",
        f"algo:{config.grpo.loss_type}",
        f"warmstart:{config.warmstart.method}",
        *(f"data:{source}" for source in sources),
    ]


def tag_this_run(found: list[str]) -> None:
    """Add tags to the present flow run."""
    with tolerant("tags"), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.id), tags=sorted({*flow_run.tags, *found}))


def send_what_is_queued() -> None:
    """Return once the server has the logs and events that are sent in the background; before a
    private server ends."""
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=DRAIN_SECONDS)
