"""What `ratchet plan` prints: which stages would run and why, memory, time, and what the comparison
will be able to see."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import options
from flows.cli.resources import memory_as_json, show_resources
from ratchet.pipeline.request import Request, open_store, resolve

if TYPE_CHECKING:
    from ratchet.config.run import RunConfig
    from ratchet.store.store import Artifact, Store


def _last_seconds(store: Store) -> dict[str, float]:
    """How long each stage took when it was last made here."""
    found: dict[str, float] = {}
    for artifact in store.artifacts():
        found.setdefault(artifact.manifest.stage, artifact.manifest.duration_seconds)
    return found


def show_settings(request: Request) -> None:
    """Print every setting as it is resolved."""
    from ratchet.config.base import setting_lines

    config, _ = resolve(request, open_store(request.store))
    print("\n".join(setting_lines(config.model_dump(mode="json"))))


def show(request: Request, as_json: bool) -> None:
    """Print the plan."""
    from ratchet.evaluation.power import num_train
    from ratchet.pipeline.plan import make_plan

    store = open_store(request.store)
    config, previous = resolve(request, store)
    plan = make_plan(config, store, previous=previous)
    running = {planned.node.stage for planned in plan.nodes if planned.state == "run"}
    seconds = _last_seconds(store)
    rows = [
        {
            "node": planned.node.name,
            "stage": planned.node.stage,
            "state": planned.state,
            "why": planned.why,
            "key": planned.key,
            "inputs": planned.node.inputs,
            "last_seconds": seconds.get(planned.node.stage),
        }
        for planned in plan.nodes
    ]
    if as_json:
        memory = memory_as_json(config, store, running)
        rows = [row | {"memory": memory.get(str(row["stage"]))} for row in rows]
        print(json.dumps(rows, indent=2))
        return
    _print_plan(config, rows)
    loaded, clean = (
        store.find(name, plan.named(name).key) for name in ("questions", "decontaminate")
    )
    show_resources(config, store, running, num_train(config, clean or loaded))
    _print_detectable(config, loaded)


def _print_detectable(config: RunConfig, questions: Artifact | None) -> None:
    """What the comparison will be able to see, from the questions themselves if they are there."""
    from ratchet.evaluation.power import counts_in, detectable_differences, expected_counts

    counts = expected_counts(config) if questions is None else counts_in(questions)
    lines = detectable_differences(counts, config.evaluate.confidence)
    if lines:
        print("\nThe comparison at the end finds a true difference, 4 times in 5, from")
        print("\n".join(f"  {line}" for line in lines))


def _few(names: list[str], what: str) -> str:
    """The names where they are few, else their number."""
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} {what}"


def _print_plan(config: RunConfig, rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ratchet.pipeline.dag import STAGES

    table = Table(title=f"Plan for '{config.name}'", title_justify="left", box=None, pad_edge=False)
    for heading in ("stage", "", "from", "why it runs, or what it does", "last"):
        table.add_column(
            heading,
            no_wrap=heading not in ("from", "why it runs, or what it does"),
        )
    for row in rows:
        reuse = row["state"] == "reuse"
        inputs = list(row["inputs"].values())
        last = row["last_seconds"]
        table.add_row(
            row["node"],
            "[green]reuse[/]" if reuse else "[yellow]run[/]",
            _few(inputs, "stages"),
            row["why"] or f"[dim]{STAGES[row['stage']].gist}[/]",
            "" if last is None else f"{last:.0f} s",
        )
    console = Console()
    console.print(table)
    num_run = sum(row["state"] == "run" for row in rows)
    console.print(
        f"\n{num_run} of {len(rows)} stages would run, {len(rows) - num_run} are reused. "
        "Nothing was started."
    )


def plan(
    preset: options.Preset = None,
    from_run: options.FromRun = None,
    assignments: options.Settings = None,
    data: options.Data = None,
    store: options.Store = options.DEFAULT_STORE,
    settings: Annotated[
        bool, typer.Option("--settings", help="Print every setting instead, as it is resolved.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show what a run would do: what is reused, what runs, and why. Starts nothing."""
    request = Request(preset, from_run, assignments or [], None, data, store)
    if settings:
        show_settings(request)
    else:
        show(request, as_json)
