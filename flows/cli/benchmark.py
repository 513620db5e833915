"""`ratchet benchmark`: only the measuring of a run, for any model and questions; nothing trains.

It is the run's own `benchmark` node with what lies above it, so a later run of the same settings
reuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.errors import UserError
from ratchet.pipeline import request as cli_plan

if TYPE_CHECKING:
    from pathlib import Path

    from ratchet.store.runs import RunRecord

BENCHMARK = "benchmark"
"""The node, and what the name of such a run ends with."""


def prepare_benchmark(request: cli_plan.Request, *, force: bool, command: str) -> RunRecord:
    """Check the settings and write the run's record. UserError where there is nothing to ask."""
    from ratchet.pipeline.dag import nodes

    store = cli_plan.open_store(request.store)
    config, previous = cli_plan.resolve(request, store)
    if all(node.name != BENCHMARK for node in nodes(config)):
        role = config.benchmark.role
        raise UserError(
            f"questions.{role} is empty: add a source to it, or choose another benchmark.role"
        )
    return cli_plan.record_measurement(config, previous, store, BENCHMARK, force, command)


def show_benchmark(store: Path, record: RunRecord) -> None:
    """Print the table and the words, if it got as far as an artifact."""
    from rich.console import Console
    from rich.markdown import Markdown

    found = cli_plan.open_store(store).find(BENCHMARK, record.nodes[BENCHMARK].key)
    if found is not None:
        console = Console()
        console.print()
        console.print(Markdown(found.manifest.markdown))
