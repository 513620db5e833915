"""The manifest: what an artifact is, what made it and what lies in it.

`manifest.json` is written last, so its existence means that the artifact is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ratchet.errors import UserError
from ratchet.store.keys import canonical_json, text_hash

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class Record(BaseModel):
    """A frozen record; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FileRecord(Record):
    """One file of an artifact."""

    sha256: str
    num_bytes: int


class ParentRecord(Record):
    """One input of an artifact."""

    stage: str
    key: str
    content: str
    """Content hash the input had when it was used."""


class Manifest(Record):
    """Everything known about a finished artifact."""

    format_version: int = FORMAT_VERSION
    stage: str
    node: str
    key: str
    run_id: str
    """Run that made it; later runs may reuse it."""
    config: dict[str, Any]
    """The configuration sections the stage was given."""
    fingerprints: dict[str, str]
    """Hashes of what the configuration points at outside the store."""
    parents: dict[str, ParentRecord]
    """Inputs by role."""
    code_version: str
    packages: dict[str, str]
    """Versions of the packages that matter."""
    git_commit: str | None
    seed: int
    host: str
    device: str
    started_at: str
    """UTC, ISO 8601."""
    duration_seconds: float
    rows: dict[str, int]
    """Rows of each table."""
    files: dict[str, FileRecord]
    content: str
    """Hash over names and hashes of all files."""
    summary: dict[str, Any]
    """The stage's own figures."""
    markdown: str
    """The stage's own words."""
    sampled_tokens: int = 0
    device_seconds: float = 0.0
    prefect: dict[str, str] = {}
    """Id of the flow run that made it."""
    wandb_run: str | None = None


def content_hash(files: dict[str, FileRecord]) -> str:
    """Hash over names and hashes of an artifact's files."""
    return text_hash(canonical_json({name: file.sha256 for name, file in files.items()}))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None when the artifact isn't complete."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = Manifest.model_validate_json(text)
    if manifest.format_version != FORMAT_VERSION:
        raise UserError(
            f"{folder} has a manifest of version {manifest.format_version}, this Ratchet reads "
            f"version {FORMAT_VERSION}: use another store folder or remove that artifact"
        )
    return manifest
