"""What a stage is: all that is known of a kind of work beside the code that does it.

A *stage* is a kind of work (`presample`, `filter`, …); a *node* is one use of it in a run: the
evaluation of three variants is three nodes of one stage. Whoever plans, runs or shows stages reads
it here and asks for none by name. What is only shown of a result (headline, table, charts) stands
here and not in the stage's own code, so that other words make nothing anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet.config.base import Section
from ratchet.config.run import RunConfig

Summary = dict[str, Any]
Row = dict[str, Any]

FIRST_FIGURES = 3
"""Of a stage's summary, shown where the stage names no figures."""


@dataclass(frozen=True)
class Node:
    """One use of a stage in a run."""

    name: str
    """Unique in the run; the stage's name, or `stage.variant`."""
    stage: str
    """Name of its stage."""
    inputs: Mapping[str, str]
    """Role that the stage's code knows an input by → name of the node that makes it."""
    settings: Mapping[str, Section] = field(default_factory=dict)
    """Sections in which this node differs from the run."""
    after: tuple[str, ...] = ()
    """Nodes that must be there first, though it reads nothing of them: they don't enter its key."""
    given: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Role → (stage, key) of inputs that an earlier run made."""

    def config(self, config: RunConfig) -> RunConfig:
        """The run's configuration as this node sees it."""
        return config.model_copy(update=dict(self.settings))


def first_figures(summary: Summary) -> list[str]:
    """The first plain figures of a summary."""
    plain = [item for item in summary.items() if isinstance(item[1], int | float | str)]
    return [f"{name.replace('_', ' ')} {value}" for name, value in plain[:FIRST_FIGURES]]


@dataclass(frozen=True)
class Stage:
    """One kind of work."""

    name: str
    run: str
    """`module:function` that does it, called as `function(ctx, **sections)`."""
    gist: str
    """One line for people."""
    sections: tuple[str, ...] = ()
    """Configuration sections it is given; they enter its key, but for `unkeyed`."""
    unkeyed: tuple[str, ...] = ()
    """Sections that can stop it or speed it up but not change what it makes."""
    needs_device: bool = False
    """Whether it takes the device slot (it loads a model)."""

    inputs: Mapping[str, str] | Callable[[RunConfig], Mapping[str, str]] = field(
        default_factory=dict
    )
    """Inputs of its one node, as in `Node`."""
    when: Callable[[RunConfig], bool] = lambda config: True
    """Whether a run has that node."""
    nodes: Callable[[RunConfig], list[Node]] | None = None
    """Its nodes, where that isn't one with these inputs."""
    reads_all: bool = False
    """Whether its node reads every node that doesn't come from it."""
    outside: Callable[[RunConfig, Node], dict[str, str]] = lambda config, node: {}
    """Hashes of what its sections point at outside the store, but for prompt format and rewards,
    which `plan` knows."""

    form: str | None = None
    """Section whose fields its form shows; that of its own name where it has one."""
    implied: tuple[str, ...] = ()
    """What asking for it says by itself, as `--set` takes it."""

    figures: Callable[[Summary], Sequence[str]] = first_figures
    """What a person wants to see first of a result, in a few parts, the first one alone where there
    is little room."""
    short: Callable[[Summary], str] | None = None
    """What to show where there is little room, if not the first part."""
    shares: Callable[[Summary], Mapping[str, float]] | None = None
    """Shares that its page compares as bars, by name."""
    table: str | Callable[[Summary], list[Row]] | None = None
    """Stored table, or rows from the summary, that are shown of it; every figure of the summary
    otherwise."""
    charts: tuple[str, ...] = ()
    """`module:function` of its plots, each a figure of the report."""

    @property
    def module(self) -> str:
        """The module that does it."""
        return self.run.partition(":")[0]

    @property
    def own_section(self) -> str | None:
        """Section whose fields its form shows; None for a stage with none of its own."""
        return self.form or (self.name if self.name in self.sections else None)

    def nodes_of(self, config: RunConfig) -> list[Node]:
        """Its nodes in a run."""
        if self.nodes is not None:
            return self.nodes(config)
        if not self.when(config):
            return []
        inputs = self.inputs(config) if callable(self.inputs) else self.inputs
        return [Node(self.name, self.name, inputs)]

    def headline(self, summary: Summary) -> str:
        """A result's figures in a line; none where one is missing, as in artifacts of other
        code."""
        try:
            return ", ".join(self.figures(summary))
        except (KeyError, TypeError):  # TypeError: None for a figure that can't be had
            return ""

    def label(self, summary: Summary) -> str:
        """A result's figure in a few words."""
        try:
            return self.short(summary) if self.short else self.figures(summary)[0]
        except (KeyError, TypeError, IndexError):
            return ""
