"""The nodes of a run and how they depend on each other, from its configuration alone."""

from __future__ import annotations

from dataclasses import replace

from ratchet.config.run import RunConfig
from ratchet.errors import UserError
from ratchet.pipeline.stage import Node
from ratchet.pipeline.stages import STAGES


def nodes(config: RunConfig) -> list[Node]:
    """The nodes of a run in an order in which each comes after its inputs: that of `STAGES` as far
    as possible. What reads everything waits until nothing else can come."""
    waiting = [node for stage in STAGES.values() for node in stage.nodes_of(config)]
    placed: dict[str, Node] = {}
    while waiting:
        ready = [n for n in waiting if placed.keys() >= {*n.inputs.values(), *n.after}]
        assert ready, f"{', '.join(node.name for node in waiting)}: inputs that no node makes"
        node = next((n for n in ready if not STAGES[n.stage].reads_all), ready[0])
        waiting.remove(node)
        if STAGES[node.stage].reads_all:
            node = replace(node, inputs={name: name for name in placed})
        placed[node.name] = node
    return list(placed.values())


def nodes_named(config: RunConfig, name: str) -> list[Node]:
    """The node called `name`, or all nodes of the stage called so: 'evaluate' is every variant.

    UserError when there is none.
    """
    every = nodes(config)
    found = [node for node in every if node.name == name] or [
        node for node in every if node.stage == name
    ]
    if not found:
        names = ", ".join(node.name for node in every)
        raise UserError(f"this run has no stage '{name}': it has {names}")
    return found


def ancestors(config: RunConfig, name: str, *, read: bool = False) -> set[str]:
    """Names of the nodes that must be there before `name`; with `read` only those whose artifacts
    it depends on."""
    by_name = {node.name: node for node in nodes(config)}

    def above(node: Node) -> list[str]:
        return [*node.inputs.values(), *(() if read else node.after)]

    found: set[str] = set()
    todo = above(by_name[name])
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo.extend(above(by_name[current]))
    return found


def descendants(config: RunConfig, name: str) -> set[str]:
    """Names of the nodes that depend on `name`, itself left out."""
    return {node.name for node in nodes(config) if name in ancestors(config, node.name)}
