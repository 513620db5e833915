"""The job file: everything a worker process is told about the one stage it runs.

The flow writes it before the worker starts; the worker reads nothing else of the run, so what ran
can be run again with `python -m tasks.runtime.worker JOB.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratchet.store.manifest import Record


class InputRef(Record):
    """An input artifact."""

    stage: str
    key: str


class Job(Record):
    """One stage to run."""

    store: Path
    run_id: str
    node: str
    stage: str
    key: str
    sections: dict[str, Any]
    """Resolved configuration sections, as `RunConfig.model_dump(mode='json')` gives them."""
    fingerprints: dict[str, str]
    code_version: str
    inputs: dict[str, InputRef]
    """Input artifacts by role."""
    seed: int
    force: bool = False
    """Make the artifact even if it exists."""
    log_file: Path
    """Where everything the stage's libraries print goes."""
    prefect: dict[str, str] = {}
    """Id of the flow run, for the manifest."""
