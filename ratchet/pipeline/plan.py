"""What a run would do: the key of every node, whether it exists already, and why not.

Keys follow from the configuration alone, so a plan costs no model and no GPU. It looks at
manifests but not at every byte; the worker checks the bytes before it uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ratchet import prompts
from ratchet.config.load import with_present_names
from ratchet.config.run import RunConfig
from ratchet.pipeline.dag import ancestors, nodes
from ratchet.pipeline.stage import Node, Stage
from ratchet.pipeline.stages import STAGES
from ratchet.rewards import functions as rewards
from ratchet.store.code import code_version
from ratchet.store.keys import artifact_key
from ratchet.store.runs import RunRecord
from ratchet.store.store import Store


@dataclass(frozen=True)
class PlannedNode:
    """One node with its key and what will happen to it."""

    node: Node
    key: str
    sections: dict[str, Any]
    """Its configuration sections as JSON values."""
    fingerprints: dict[str, str]
    code_version: str
    state: Literal["reuse", "run"]
    why: str
    """Why it will run; empty for a reused node."""


@dataclass(frozen=True)
class Plan:
    """The nodes of a run in topological order."""

    nodes: list[PlannedNode]

    def named(self, name: str) -> PlannedNode:
        """The planned node called `name`."""
        return next(planned for planned in self.nodes if planned.node.name == name)

    def needed(self, targets: list[str], config: RunConfig) -> list[PlannedNode]:
        """The targets and everything above them."""
        wanted = set(targets).union(*(ancestors(config, name) for name in targets))
        return [planned for planned in self.nodes if planned.node.name in wanted]


def _fingerprints(stage: Stage, node: Node, config: RunConfig) -> dict[str, str]:
    """Hashes of what a node's sections point at outside the store."""
    found = stage.outside(config, node)
    if "rewards" in stage.sections:
        found |= rewards.fingerprints(config.rewards.weights)
    if "prompt" in stage.sections:
        found["prompt"] = prompts.fingerprint(config.prompt.format)
    return found


def _without_local_paths(value: Any) -> Any:
    """The value with absolute paths blanked: fingerprints cover what lies there, so a moved
    folder changes no key."""
    if isinstance(value, dict):
        return {name: _without_local_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_local_paths(inner) for inner in value]
    if isinstance(value, str) and value.startswith("/"):
        return "<local>"
    return value


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested dicts by dotted path."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found.update(_flat(inner, f"{path}.{name}" if path else name))
    return found


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two configurations: 'filter.keep_below: 1.0 → 0.9'."""
    before, after = _flat(old), _flat(new)
    return [
        f"{path}: {before.get(path, 'unset')} → {after.get(path, 'unset')}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def _why_new(
    planned: PlannedNode,
    store: Store,
    previous: RunRecord | None,
    keys: dict[str, str],
    seed: int,
) -> str:
    """Why no artifact with this key exists, by comparison with the previous run's; `keys` are
    those of the nodes above."""
    record = None if previous is None else previous.nodes.get(planned.node.name)
    found = None if record is None else store.find(record.stage, record.key)
    if found is None:
        return "not made yet"
    old = found.manifest
    reasons = changes(with_present_names(old.config, hint=False), planned.sections)
    reasons += [
        f"{name} has changed"
        for name, value in planned.fingerprints.items()
        if old.fingerprints.get(name, value) != value
    ]
    if old.code_version != planned.code_version:
        reasons.append("its code has changed")
    if old.seed != seed:
        reasons.append(f"seed: {old.seed} → {seed}")
    if reasons:
        return "; ".join(reasons)
    names = [
        name
        for role, name in planned.node.inputs.items()
        if role not in old.parents or old.parents[role].key != keys[name]
    ]
    return "input changed: " + (", ".join(names) if len(names) <= 3 else f"{len(names)} of them")


def make_plan(
    config: RunConfig,
    store: Store,
    *,
    force: frozenset[str] = frozenset(),
    previous: RunRecord | None = None,
) -> Plan:
    """Plan a run of `config`; `force` names nodes that are made anew, `previous` is the run that
    reasons are told against."""
    keys: dict[str, str] = {}
    running: set[str] = set()
    planned_nodes: list[PlannedNode] = []
    for node in nodes(config):
        stage = STAGES[node.stage]
        own = node.config(config)
        whole = own.model_dump(mode="json", include=set(stage.sections))
        sections = {name: whole[name] for name in stage.sections}
        prints = _fingerprints(stage, node, own)
        code = code_version(stage.module)
        inputs = {role: keys[name] for role, name in node.inputs.items()}
        inputs |= {role: given for role, (_, given) in node.given.items()}
        keyed = {name: value for name, value in sections.items() if name not in stage.unkeyed}
        key = artifact_key(
            node.stage, _without_local_paths(keyed), prints, inputs, code, config.seed
        )
        keys[node.name] = key
        planned = PlannedNode(node, key, sections, prints, code, "run", "")
        above = [name for name in node.inputs.values() if name in running]
        found = store.find(node.stage, key)
        if node.name in force:
            why = "asked for"
        elif found is None:
            why = _why_new(planned, store, previous, keys, config.seed)
        elif (role := store.stale_parent(found)) is not None:
            why = f"'{role}' was made anew since"
        elif above:
            why = f"{', '.join(above)} runs again"
        else:
            why = ""
        if why:
            running.add(node.name)
        planned_nodes.append(
            PlannedNode(node, key, sections, prints, code, "run" if why else "reuse", why)
        )
    return Plan(planned_nodes)


def made_by_other_code(store: Store, record: RunRecord) -> bool:
    """Whether another version of a stage's code made one of the run's artifacts, so that a rerun
    makes it anew."""
    made = (store.find(node.stage, node.key) for node in record.nodes.values())
    return any(
        item.manifest.stage not in STAGES
        or item.manifest.code_version != code_version(STAGES[item.manifest.stage].module)
        for item in made
        if item is not None
    )
