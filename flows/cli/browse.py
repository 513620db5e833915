"""Commands that look: `runs`, `show`, `lineage`, `report`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet.errors import UserError

if TYPE_CHECKING:
    from rich.tree import Tree

    from ratchet.store.lineage import Ancestry
    from ratchet.store.runs import RunRecord
    from ratchet.store.store import Artifact, Store

DEFAULT_STORE = Path("artifacts")
MESSAGE_WIDTH = 30
"""Columns that a message must have to be readable beside its run."""

StoreOption = Annotated[
    Path,
    typer.Option("--store", envvar="RATCHET_STORE", help="Folder that artifacts are kept in."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RefArgument = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A run (id, name, 'latest'), RUN/stage such as latest/filter, or an artifact's key.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(runs)
    app.command()(show)
    app.command()(lineage)
    app.command()(report)


def open_store(path: Path) -> Store:
    from ratchet.store.store import Store

    if not path.is_dir():
        raise UserError(
            f"there is no store at {path.absolute()}: run from the project's folder, name it with "
            "--store, or make one with `ratchet run --preset demo`"
        )
    return Store(path.absolute())


def runs(
    store: StoreOption = DEFAULT_STORE,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the runs in the store, newest first."""
    from ratchet.store.runs import all_runs

    found = all_runs(open_store(store))[:limit]
    if as_json:
        print(json.dumps([run.model_dump(mode="json", exclude={"config"}) for run in found]))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    rows = [(run.run_id, _status(run), _progress(run)) for run in found]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    left = console.width - sum(widths) - 2 * len(widths)
    if left < MESSAGE_WIDTH:  # what stopped a run stands below it
        for run, row in zip(found, rows, strict=True):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.print("  ".join(cells).rstrip(), highlight=False, soft_wrap=True)
            if run.message:
                below = shorten(run.message, console.width - 2, placeholder=" …")
                console.print(f"  {below}", highlight=False, style="dim")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "status", "stages", "verdict, or what stopped it"):
        table.add_column(heading)
    for run, row in zip(found, rows, strict=True):
        table.add_row(*row, shorten(run.message, left, placeholder=" …"))
    console.print(table, highlight=False)
    if not found:
        print("no runs yet: start one with `ratchet run --preset demo`")


def _status(run: RunRecord) -> str:
    """How far the run is, with what was asked for where that wasn't the whole pipeline."""
    if set(run.targets) == set(run.nodes):
        return run.status.value
    more = f" +{len(run.targets) - 1}" if len(run.targets) > 1 else ""
    return f"{run.status.value} ({run.targets[0]}{more} only)"


def _progress(run: RunRecord) -> str:
    """'9 of 11': nodes that are there."""
    done = sum(node.state in ("done", "reused") for node in run.nodes.values())
    return f"{done} of {len(run.nodes)}"


def show(ref: RefArgument, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Show a run with its stages, or one artifact with its figures."""
    from ratchet.store.lineage import find_artifact, names_a_run
    from ratchet.store.runs import load_run

    opened = open_store(store)
    if names_a_run(opened, ref):
        _show_run(opened, load_run(opened, ref), as_json)
    else:
        _show_artifact(find_artifact(opened, ref), as_json)


def _show_run(store: Store, run: RunRecord, as_json: bool) -> None:
    if as_json:
        print(run.model_dump_json(indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    from ratchet.store.standing import standing

    console = Console()
    console.print(f"[bold]{run.run_id}[/]  {run.status}", highlight=False)
    console.print(f"{run.created_at[:19]} UTC   {run.command}", highlight=False, style="dim")
    if run.message:
        console.print(run.message, highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "state", "artifact", "seconds"):
        table.add_column(heading, overflow="fold")
    stands = standing(store, run)
    for name, node in run.nodes.items():
        made = store.find(node.stage, node.key) is not None
        table.add_row(
            name,
            stands[name],
            f"{node.stage}/{node.key[:8]}" if made else "",
            "" if node.seconds is None else f"{node.seconds:.1f}",
        )
    console.print(table)
    console.print(
        f"in {_shorter(store.root)}; `ratchet show {run.run_id}/STAGE` tells more", style="dim"
    )
    for line in _advice(store, run, stands):
        console.print(line, highlight=False)


def _advice(store: Store, run: RunRecord, stands: dict[str, str]) -> Iterator[str]:
    """What to do about stages that are stale or missing, and where a whole result is."""
    from ratchet.store.standing import last_complete

    if "stale" in stands.values():
        yield (
            "stale: made from something that has changed since; "
            f"`ratchet run --run {run.run_id}` makes these anew"
        )
    complete = last_complete(store)
    if complete is not None and run.status not in ("completed", "running"):
        yield f"The last complete run is {complete.run_id}."


def tell_base(store: Path, record: RunRecord) -> None:
    """Say so when a run's settings come from one that didn't complete: 'latest' may be that."""
    from ratchet.store.runs import RunStatus, load_run
    from ratchet.store.standing import last_complete

    if record.based_on is None:
        return
    opened = open_store(store)
    base = load_run(opened, record.based_on)
    if base.status is RunStatus.COMPLETED:
        return
    complete = last_complete(opened)
    other = "" if complete is None else f"; the last complete run is {complete.run_id}"
    typer.echo(f"note: settings are those of {base.run_id}, status {base.status}{other}", err=True)


def _shorter(path: Path) -> str:
    """The path relative to here where that is possible."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _show_artifact(artifact: Artifact, as_json: bool) -> None:
    manifest = artifact.manifest
    if as_json:
        print(manifest.model_dump_json(indent=2))
        return
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{artifact.ref}[/]  made by run {manifest.run_id}", highlight=False)
    console.print(
        f"{manifest.started_at[:19]} UTC, {manifest.duration_seconds:.1f} s on {manifest.device}",
        style="dim",
        highlight=False,
    )
    if manifest.markdown:
        console.print(Markdown(manifest.markdown))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in _figures(_unsaid(manifest.summary, manifest.markdown)):
        table.add_row(*row)
    console.print(table, highlight=False)
    for name, file in manifest.files.items():
        rows = manifest.rows.get(Path(name).stem) if name.endswith(".parquet") else None
        note = f", {rows:,} rows" if rows is not None else ""
        console.print(
            f"{_shorter(artifact.folder / name)}  {file.num_bytes:,} bytes{note}", highlight=False
        )


def _unsaid(summary: dict[str, Any], markdown: str) -> dict[str, Any]:
    """The figures without sentences that the text holds already."""
    return {
        name: value
        for name, value in summary.items()
        if not (isinstance(value, list) and value and all(str(line) in markdown for line in value))
    }


def _figures(summary: dict[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    """(name, value) of nested figures for people: what holds only plain figures stands on one
    line, what holds more is indented below its name, and long lists are only counted."""
    for name, value in summary.items():
        label = indent + name
        if isinstance(value, dict):
            plain = {key: inner for key, inner in value.items() if not isinstance(inner, dict)}
            words = " · ".join(f"{key}: {_value(inner)}" for key, inner in plain.items())
            yield label, words if value else "none"
            nested = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
            yield from _figures(nested, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], str):
            yield from ((label if line is value[0] else "", line) for line in value)
        else:
            yield label, _value(value)


def _value(value: Any) -> str:
    """A figure for people: four significant digits; entries that are more than a figure counted."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        if any(isinstance(inner, dict | list) for inner in value):
            return f"{len(value)} entries, which --json shows"
        return ", ".join(map(_value, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def lineage(
    ref: RefArgument, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show what an artifact (or a run's last one) was made from, as a tree."""
    from ratchet.store.lineage import ancestry, find_artifact, names_a_run
    from ratchet.store.runs import load_run

    opened = open_store(store)
    if names_a_run(opened, ref):
        run = load_run(opened, ref)
        made = [node for node in run.nodes.values() if opened.find(node.stage, node.key)]
        if not made:
            raise UserError(f"run {run.run_id} has made nothing yet")
        tree = ancestry(opened, made[-1].stage, made[-1].key)
    else:
        artifact = find_artifact(opened, ref)
        tree = ancestry(opened, artifact.manifest.stage, artifact.manifest.key)
    if as_json:
        print(json.dumps(tree.as_json(), indent=2))
        return
    from rich.console import Console

    Console().print(_draw(tree, set(), None), highlight=False)


def _draw(item: Ancestry, drawn: set[str], parent: Tree | None) -> Tree:
    """The ancestry as a rich tree; what was drawn once is only named again."""
    from rich.tree import Tree

    label = f"[bold]{item.stage}[/] {item.key[:8]}"
    if item.manifest is None:
        label += " [red]missing[/]"
    else:
        label += f" [dim]{item.manifest.started_at[:16]} {item.manifest.run_id}[/]"
    if item.stale:
        label += " [yellow]made anew since[/]"
    again = item.key in drawn and bool(item.parents)
    if again:
        label += " [dim](shown above)[/]"
    branch = Tree(label) if parent is None else parent.add(label)
    drawn.add(item.key)
    for inner in () if again else item.parents:
        _draw(inner, drawn, branch)
    return branch


def report(
    run_ref: Annotated[str, typer.Argument(metavar="RUN", help="Run id, name or 'latest'.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Print where a run's report lies; open it in a browser."""
    from ratchet.store.lineage import find_artifact

    print(find_artifact(open_store(store), f"{run_ref}/report").path("report.html"))
