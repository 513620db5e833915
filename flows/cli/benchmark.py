"""`ratchet benchmark`: only the measuring of a run, for any model and questions; nothing trains.

It is the run's own `benchmark` node with what lies above it, so a later run of the same settings
reuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import options
from flows.cli.run import start, typed_command
from ratchet.errors import UserError
from ratchet.pipeline.request import Request, open_store, record_measurement, resolve

if TYPE_CHECKING:
    from pathlib import Path

    from ratchet.store.runs import RunRecord

BENCHMARK = "benchmark"
"""The node, and what the name of such a run ends with."""


def prepare_benchmark(request: Request, *, force: bool, command: str) -> RunRecord:
    """Check the settings and write the run's record. UserError where there is nothing to ask."""
    from ratchet.pipeline.dag import nodes

    store = open_store(request.store)
    config, previous = resolve(request, store)
    if all(node.name != BENCHMARK for node in nodes(config)):
        role = config.benchmark.role
        raise UserError(
            f"questions.{role} is empty: add a source to it, or choose another benchmark.role"
        )
    return record_measurement(config, previous, store, BENCHMARK, force, command)


def show_benchmark(store: Path, record: RunRecord) -> None:
    """Print the table and the words, if it got as far as an artifact."""
    from rich.console import Console
    from rich.markdown import Markdown

    found = open_store(store).find(BENCHMARK, record.nodes[BENCHMARK].key)
    if found is not None:
        console = Console()
        console.print()
        console.print(Markdown(found.manifest.markdown))


def benchmark(
    preset: options.Preset = None,
    from_run: options.FromRun = None,
    assignments: options.Settings = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if it was done.")
    ] = False,
    data: options.Data = None,
    store: options.Store = options.DEFAULT_STORE,
) -> None:
    """Measure prompt formats, thinking and decoding of a model; trains nothing.

    Set benchmark.formats, .thinking, .decoding, .role, .source and .limit, and model.path for
    another model.
    """
    request = Request(preset, from_run, assignments or [], None, data, store)
    record = prepare_benchmark(request, force=force, command=typed_command())
    code = start(store, record)
    show_benchmark(store, record)
    raise typer.Exit(code)
