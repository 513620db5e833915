"""`ratchet benchmark`: only the measuring of a run, for any model and questions; nothing trains.

It is the run's own `benchmark` node with what lies above it, so a later run of the same settings
reuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet import cli_plan
from ratchet.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from ratchet.store.runs import RunRecord

BENCHMARK = "benchmark"
SUFFIX = "-benchmark"
"""What the name of such a run ends with."""


def prepare_benchmark(request: cli_plan.Request, *, force: bool, command: str) -> RunRecord:
    """Check the settings and write the run's record. UserError where there is nothing to ask."""
    from ratchet.dag import nodes
    from ratchet.plan import make_plan
    from ratchet.store.runs import create_run

    store = cli_plan.open_store(request.store)
    config, previous = cli_plan.resolve(request, store)
    if all(node.name != BENCHMARK for node in nodes(config)):
        role = config.benchmark.role
        raise UserError(
            f"questions.{role} is empty: add a source to it, or choose another benchmark.role"
        )
    if not config.name.endswith(SUFFIX):  # no run of the pipeline, and not to be taken for one
        config = config.model_copy(update={"name": config.name + SUFFIX})
    forced = [BENCHMARK] if force else []
    plan = make_plan(config, store, force=frozenset(forced), previous=previous)
    record = cli_plan.new_record(config, plan, [BENCHMARK], forced, command)
    record = record.model_copy(update={"based_on": None if previous is None else previous.run_id})
    create_run(store, record)
    return record


def show_benchmark(store: Path, record: RunRecord) -> None:
    """Print the table and the words, if it got as far as an artifact."""
    from rich.console import Console
    from rich.markdown import Markdown

    found = cli_plan.open_store(store).find(BENCHMARK, record.nodes[BENCHMARK].key)
    if found is not None:
        console = Console()
        console.print()
        console.print(Markdown(found.manifest.markdown))
