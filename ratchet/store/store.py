"""The store: content-addressed artifacts in a folder, `<stage>/<key>/`.

Files are written to a temporary sibling, synced to disk and renamed; `manifest.json` comes last.
Whatever dies at whatever moment leaves either a complete artifact or none.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import UserError
from ratchet.store.keys import file_hash
from ratchet.store.lock import hold
from ratchet.store.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    ParentRecord,
    content_hash,
    read_manifest,
)
from ratchet.store.schemas import read_table

if TYPE_CHECKING:
    import pyarrow as pa

RUNS = "runs"


@dataclass(frozen=True)
class Artifact:
    """A complete artifact on disk."""

    folder: Path
    manifest: Manifest

    @property
    def ref(self) -> str:
        """`stage/key`."""
        return f"{self.manifest.stage}/{self.manifest.key}"

    def path(self, name: str) -> Path:
        """Path of a file or folder in the artifact; UserError when it isn't there."""
        path = self.folder / name
        if not path.exists():
            raise UserError(f"artifact {self.ref} holds no {name}")
        return path

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Table `name` of the artifact, its schema checked."""
        return read_table(self.folder / f"{name}.parquet", name, columns)

    def as_parent(self) -> ParentRecord:
        """How a child's manifest records this artifact."""
        found = self.manifest
        return ParentRecord(stage=found.stage, key=found.key, content=found.content)


@dataclass(frozen=True)
class Build:
    """An artifact in the making."""

    out_dir: Path
    """Files written here become the artifact."""
    work_dir: Path
    """Unfinished state that survives a crash."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write `path` so that readers see the old text or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Hash and size of every file below `folder` but the manifest, synced to disk."""
    records: dict[str, FileRecord] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_dir():
            _sync(file)
        elif file.name != MANIFEST or file.parent != folder:
            _sync(file)
            name = file.relative_to(folder).as_posix()
            records[name] = FileRecord(sha256=file_hash(file), num_bytes=file.stat().st_size)
    _sync(folder)
    return records


class Store:
    """Artifacts below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, stage: str, key: str) -> Path:
        """Where the artifact lies or would lie."""
        return self.root / stage / key

    def work_folder(self, stage: str, key: str) -> Path:
        """Where a stage keeps what it has so far, while it runs and after a crash."""
        return self.root / stage / f".work-{key}"

    def find(self, stage: str, key: str) -> Artifact | None:
        """The artifact if it is complete; its files aren't looked at."""
        folder = self.folder(stage, key)
        manifest = read_manifest(folder)
        return None if manifest is None else Artifact(folder, manifest)

    def get(self, stage: str, key: str) -> Artifact:
        """The artifact; UserError when it isn't complete."""
        found = self.find(stage, key)
        if found is None:
            raise UserError(f"no complete artifact {stage}/{key} in {self.root}")
        return found

    def damage(self, artifact: Artifact) -> str | None:
        """What is wrong with an artifact's files (every byte is read), or None."""
        for name, record in artifact.manifest.files.items():
            file = artifact.folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != record.num_bytes:
                return f"{name} has {file.stat().st_size} bytes, not {record.num_bytes}"
            if file_hash(file) != record.sha256:
                return f"{name} has changed since it was written"
        return None

    def stale_parent(self, artifact: Artifact) -> str | None:
        """Role of an input that was made anew, with another content, since it was used."""
        for role, parent in artifact.manifest.parents.items():
            current = self.find(parent.stage, parent.key)
            if current is not None and current.manifest.content != parent.content:
                return role
        return None

    def reusable(self, stage: str, key: str, log: Callable[[str], None]) -> Artifact | None:
        """The artifact if it is complete, undamaged and made from its inputs as they are now."""
        found = self.find(stage, key)
        if found is None:
            return None
        if (damage := self.damage(found)) is not None:
            log(f"artifact {found.ref} is damaged ({damage}): it is made again")
            return None
        if (role := self.stale_parent(found)) is not None:
            log(f"artifact {found.ref} was made from another '{role}': it is made again")
            return None
        return found

    @contextmanager
    def lock(self, stage: str, key: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold the artifact's lock; `on_wait` is told who has it meanwhile."""
        with hold(self.root / ".locks" / f"{stage}-{key}.lock", on_wait):
            yield

    @contextmanager
    def build(self, stage: str, key: str) -> Iterator[Build]:
        """Folders to make an artifact in; call under its lock and `commit` before leaving.

        After an exception `out_dir` is removed and `work_dir` kept for the next attempt.
        """
        parent = self.root / stage
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f".new-{key}-*"):  # of a dead owner: we hold the lock
            shutil.rmtree(left)
        out_dir = parent / f".new-{key}-{secrets.token_hex(4)}"
        work_dir = self.work_folder(stage, key)
        out_dir.mkdir()
        work_dir.mkdir(exist_ok=True)
        try:
            yield Build(out_dir, work_dir)
        finally:
            shutil.rmtree(out_dir, ignore_errors=True)

    def commit(self, build: Build, manifest: Manifest) -> Artifact:
        """Turn a build into the artifact `manifest` describes (its `files` are filled in here)."""
        files = file_records(build.out_dir)
        manifest = manifest.model_copy(update={"files": files, "content": content_hash(files)})
        final = self.folder(manifest.stage, manifest.key)
        old = final.with_name(f".old-{manifest.key}-{secrets.token_hex(4)}")
        if final.exists():
            # Manifest first: from here on the old artifact is incomplete, never half replaced.
            (final / MANIFEST).unlink(missing_ok=True)
            final.rename(old)
        build.out_dir.rename(final)
        _sync(final.parent)
        write_durably(final / MANIFEST, manifest.model_dump_json(indent=2))
        for left in final.parent.glob(f".old-{manifest.key}-*"):
            shutil.rmtree(left)
        shutil.rmtree(build.work_dir)
        return Artifact(final, manifest)

    def artifacts(self) -> Iterator[Artifact]:
        """All complete artifacts, newest first."""
        found = []
        for path in self.root.glob(f"*/*/{MANIFEST}"):
            if path.parent.parent.name == RUNS or path.parent.name.startswith("."):
                continue
            manifest = read_manifest(path.parent)
            if manifest is not None:
                found.append(Artifact(path.parent, manifest))
        yield from sorted(found, key=lambda item: item.manifest.started_at, reverse=True)
