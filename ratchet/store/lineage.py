"""Where an artifact comes from: itself and all its ancestors, from the manifests alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ratchet.errors import UserError
from ratchet.store.manifest import Manifest
from ratchet.store.runs import RunRecord, all_runs, load_run
from ratchet.store.store import Artifact, Store


@dataclass(frozen=True)
class Ancestry:
    """An artifact and what it was made from."""

    role: str
    """What the child calls it; empty for the one that was asked for."""
    stage: str
    key: str
    manifest: Manifest | None
    """None when the artifact is gone or incomplete."""
    stale: bool
    """Whether it was made anew, with another content, since the child used it."""
    parents: tuple[Ancestry, ...]

    def as_json(self) -> dict[str, Any]:
        """Nested plain values."""
        found = self.manifest
        return {
            "role": self.role,
            "stage": self.stage,
            "key": self.key,
            "present": found is not None,
            "stale": self.stale,
            "run_id": None if found is None else found.run_id,
            "started_at": None if found is None else found.started_at,
            "content": None if found is None else found.content,
            "parents": [parent.as_json() for parent in self.parents],
        }


def ancestry(
    store: Store, stage: str, key: str, role: str = "", content: str | None = None
) -> Ancestry:
    """The ancestry of an artifact; `content` is the hash that a child recorded."""
    found = store.find(stage, key)
    if found is None:
        return Ancestry(role, stage, key, None, False, ())
    manifest = found.manifest
    parents = tuple(
        ancestry(store, parent.stage, parent.key, name, parent.content)
        for name, parent in manifest.parents.items()
    )
    stale = content is not None and content != manifest.content
    return Ancestry(role, stage, key, manifest, stale, parents)


def _is_named(artifact: Artifact, ref: str) -> bool:
    """Whether `ref` is `stage/key` or a key, its start being enough."""
    stage, slash, key = ref.rpartition("/")
    found = artifact.manifest
    return found.key.startswith(key) and (not slash or found.stage == stage)


def find_artifact(store: Store, ref: str) -> Artifact:
    """The artifact that `ref` names.

    A ref is `stage/key`, the start of a key, or `RUN/node` with RUN as `load_run` takes it, where
    `latest/node` is the newest there is.
    UserError when nothing or more than one thing matches.
    """
    head, slash, tail = ref.partition("/")
    matches = [item for item in store.artifacts() if _is_named(item, ref)]
    if slash and not matches:
        return _node_artifact(store, head, tail)
    if len(matches) == 1:
        return matches[0]
    if matches:
        refs = ", ".join(item.ref for item in matches[:5])
        raise UserError(f"'{ref}' stands for several artifacts: {refs}")
    raise UserError(
        f"'{ref}' names no artifact in {store.root}: give stage/key, the start of a key, or "
        "RUN/node such as latest/filter (`ratchet runs` and `ratchet show RUN` list them)"
    )


def _node_artifact(store: Store, run_ref: str, node: str) -> Artifact:
    """The artifact of a run's node; for 'latest' of the newest run that has it, because the newest
    of all may be a rerun of one stage."""
    record = load_run(store, run_ref)
    if run_ref == "latest":
        record = next((run for run in all_runs(store) if _has(store, run, node)), record)
    if node not in record.nodes:
        raise UserError(f"run {record.run_id} has no '{node}': it has {', '.join(record.nodes)}")
    found = record.nodes[node]
    artifact = store.find(found.stage, found.key)
    if artifact is None:
        other = next((run for run in all_runs(store) if _has(store, run, node)), None)
        hint = "" if other is None else f"; the newest that has one is {other.run_id}/{node}"
        raise UserError(f"'{node}' of run {record.run_id} has not been made ({found.state}){hint}")
    return artifact


def _has(store: Store, run: RunRecord, node: str) -> bool:
    """Whether the run's node is there."""
    found = run.nodes.get(node)
    return found is not None and store.find(found.stage, found.key) is not None


def names_a_run(store: Store, ref: str) -> bool:
    """Whether `ref` names a run rather than an artifact."""
    if "/" in ref:
        return False
    return ref == "latest" or any(
        ref == run.name or run.run_id.startswith(ref) for run in all_runs(store)
    )


def find_run(store: Store, ref: str) -> RunRecord:
    """The run that `ref` names as `load_run` takes it, or the one that made the artifact that
    `ref` names as `find_artifact` takes it. UserError when it names neither."""
    head, slash, node = ref.partition("/")
    if not slash and (not all_runs(store) or names_a_run(store, ref)):
        return load_run(store, ref)
    if any(_is_named(item, ref) for item in store.artifacts()):
        return load_run(store, find_artifact(store, ref).manifest.run_id)
    if slash and names_a_run(store, head):
        _node_artifact(store, head, node)  # it must be there
        return load_run(store, head)
    newest = ", ".join(run.run_id for run in all_runs(store)[:3])
    raise UserError(
        f"'{ref}' is neither a run nor an artifact in {store.root}: give a run (the newest are "
        f"{newest}), 'latest', or an artifact's key as `ratchet show RUN` prints it"
    )
