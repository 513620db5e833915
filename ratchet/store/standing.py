"""How a run's stages stand now, which is more than its record can know.

A record says what the run did. Since then an artifact may have been made anew, and what was made
from it is stale; it may have been removed; or a stage that the run didn't ask for may be there.
"""

from __future__ import annotations

from enum import StrEnum

from ratchet.errors import UserError
from ratchet.store.runs import NodeState, RunRecord, RunStatus, all_runs, load_run
from ratchet.store.store import Store


class Standing(StrEnum):
    """What can be said of a node beside the states of its record."""

    THERE = "there"
    """Not asked for in this run, and there."""
    GONE = "gone"
    """Made or found by this run, and no longer in the store."""


def standing(store: Store, record: RunRecord) -> dict[str, str]:
    """How each node stands: a `NodeState` or a `Standing`."""
    before = _based_on(store, record)
    found: dict[str, str] = {}
    stale: set[tuple[str, str]] = set()
    for name, node in record.nodes.items():
        artifact = store.find(node.stage, node.key)
        if node.state in (NodeState.RUNNING, NodeState.FAILED):
            found[name] = node.state.value
        elif artifact is None:
            found[name] = _without_artifact(store, before, name, node.state)
        else:
            parents = {(parent.stage, parent.key) for parent in artifact.manifest.parents.values()}
            if store.stale_parent(artifact) is not None or parents & stale:
                stale.add((node.stage, node.key))
                found[name] = NodeState.STALE.value
            elif node.state in (NodeState.DONE, NodeState.REUSED):
                found[name] = node.state.value
            else:
                found[name] = Standing.THERE.value
    return found


def _based_on(store: Store, record: RunRecord) -> RunRecord | None:
    """The run whose settings this one started from, if its record is still there."""
    if record.based_on is None:
        return None
    try:
        return load_run(store, record.based_on)
    except UserError:
        return None


def _without_artifact(store: Store, before: RunRecord | None, name: str, state: NodeState) -> str:
    """How a node without an artifact stands: gone, stale if the run it is based on has one, or as
    its record says."""
    if state in (NodeState.DONE, NodeState.REUSED):
        return Standing.GONE.value
    old = None if before is None else before.nodes.get(name)
    if old is not None and store.find(old.stage, old.key) is not None:
        return NodeState.STALE.value
    return state.value


def last_complete(store: Store) -> RunRecord | None:
    """The newest run that brought about all of its stages."""
    return next(
        (
            run
            for run in all_runs(store)
            if run.status is RunStatus.COMPLETED and set(run.targets) == set(run.nodes)
        ),
        None,
    )
