"""Commands that carry a run out, `run` and `stage`, and how every command does that: the run is
recorded in the store, then carried out in this process, where Prefect is loaded only then."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import browse, options
from ratchet.errors import EXIT_INTERRUPTED
from ratchet.pipeline.request import Request, prepare, prepare_stage

if TYPE_CHECKING:
    from ratchet.store.runs import RunRecord


def run(
    preset: options.Preset = None,
    from_run: options.FromRun = None,
    assignments: options.Settings = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; else the preset's.")] = None,
    force: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Make this stage anew; repeatable.")
    ] = None,
    data: options.Data = None,
    store: options.Store = options.DEFAULT_STORE,
    here: options.Here = False,
) -> None:
    """Run the whole pipeline: from questions to the report.

    What exists already is reused, so the same command continues a run that was interrupted.
    """
    request = Request(preset, from_run, assignments or [], name, data, store)
    record = prepare(request, targets=[], force=force or [], command=typed_command())
    browse.tell_base(store, record)
    raise typer.Exit(start(store, record, here=here))


def stage(
    stage_name: Annotated[str, typer.Argument(metavar="NAME", help="The stage, such as filter.")],
    from_run: Annotated[
        str,
        typer.Option(
            "--run",
            "-r",
            help="The run it belongs to: id, name, 'latest', or the key of an artifact it made.",
        ),
    ] = "latest",
    assignments: options.Settings = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew even if it exists.")] = False,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="Then run everything that depends on it.")
    ] = False,
    data: options.Data = None,
    store: options.Store = options.DEFAULT_STORE,
    here: options.Here = False,
) -> None:
    """Run one stage of an earlier run, with other settings if you like.

    What lies above it is reused; a setting that would change something above is refused.
    """
    request = Request(None, from_run, assignments or [], None, data, store)
    record = prepare_stage(request, stage_name, force, downstream, typed_command())
    browse.tell_base(store, record)
    raise typer.Exit(start(store, record, here=here))


def typed_command() -> str:
    """The command line as it was typed."""
    return shlex.join(["ratchet", *sys.argv[1:]])


def start(store: Path, record: RunRecord, *, here: bool = False) -> int:
    """Say where the store is and carry out the run that was recorded there; the exit code."""
    print(f"store: {store.absolute()}", flush=True)
    return carry_out(store, record.run_id, here=here)


def carry_out(store: Path, run_id: str, *, here: bool = False) -> int:
    """Carry out a recorded run; the exit code."""
    try:
        from flows.run import carry_out_recorded

        return carry_out_recorded(store.absolute(), run_id, here=here)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
