"""The command line: `ratchet --help`.

Commands check everything they can before they start anything, print one line for a mistake and
exit with 2. They start quickly because nothing heavy is imported until a command is about to do
what needs it: Prefect, torch and engines are loaded inside the functions that call them.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import audit as audit_words
from flows.cli import benchmark as benchmark_words
from flows.cli import browse, compare, export, resample, training, verify
from flows.cli import plan as plan_words
from flows.cli.browse import DEFAULT_STORE, StoreOption
from ratchet import __version__
from ratchet.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from ratchet.pipeline.request import Request, prepare, prepare_stage

if TYPE_CHECKING:
    from ratchet.store.runs import RunRecord

app = typer.Typer(
    help="Make a small language model verifiably better at maths.",
    epilog="Start with `ratchet run --preset demo`, then `ratchet runs` and `ratchet show latest`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for module in (browse, compare, export, resample, training, verify):
    module.register(app)

PresetOption = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="A shipped preset (`ratchet presets`) or a .toml file."),
]
FromOption = Annotated[
    str | None,
    typer.Option("--run", "-r", help="An earlier run: its id, its name, or 'latest'."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Change one setting; repeatable."),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="RATCHET_DATA",
        help="Folder with local copies of the data sets (gsm8k/, svamp/, math500/ …), used in "
        "place of the hub.",
    ),
]
HereOption = Annotated[
    bool,
    typer.Option(
        "--here",
        help="Run it in this terminal's process and environment, even where `ratchet ui` would "
        "run it.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _ratchet(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Make a small language model verifiably better at maths."""


@app.command()
def run(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; else the preset's.")] = None,
    force: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Make this stage anew; repeatable.")
    ] = None,
    data: DataOption = None,
    store: StoreOption = DEFAULT_STORE,
    here: HereOption = False,
) -> None:
    """Run the whole pipeline: from questions to the report.

    What exists already is reused, so the same command continues a run that was interrupted.
    """
    request = Request(preset, from_run, assignments or [], name, data, store)
    record = prepare(request, targets=[], force=force or [], command=_command())
    browse.tell_base(store, record)
    raise typer.Exit(_start(store, record, here=here))


@app.command()
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
    assignments: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew even if it exists.")] = False,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="Then run everything that depends on it.")
    ] = False,
    data: DataOption = None,
    store: StoreOption = DEFAULT_STORE,
    here: HereOption = False,
) -> None:
    """Run one stage of an earlier run, with other settings if you like.

    What lies above it is reused; a setting that would change something above is refused.
    """
    request = Request(None, from_run, assignments or [], None, data, store)
    record = prepare_stage(request, stage_name, force, downstream, _command())
    browse.tell_base(store, record)
    raise typer.Exit(_start(store, record, here=here))


@app.command()
def benchmark(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if it was done.")
    ] = False,
    data: DataOption = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Measure prompt formats, thinking and decoding of a model; trains nothing.

    Set benchmark.formats, .thinking, .decoding, .role, .source and .limit, and model.path for
    another model.
    """
    request = Request(preset, from_run, assignments or [], None, data, store)
    record = benchmark_words.prepare_benchmark(request, force=force, command=_command())
    code = _start(store, record)
    benchmark_words.show_benchmark(store, record)
    raise typer.Exit(code)


@app.command()
def plan(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    data: DataOption = None,
    store: StoreOption = DEFAULT_STORE,
    settings: Annotated[
        bool, typer.Option("--settings", help="Print every setting instead, as it is resolved.")
    ] = False,
    as_json: browse.JsonOption = False,
) -> None:
    """Show what a run would do: what is reused, what runs, and why. Starts nothing."""
    request = Request(preset, from_run, assignments or [], None, data, store)
    if settings:
        plan_words.show_settings(request)
    else:
        plan_words.show(request, as_json)


@app.command("audit-sync")
def audit_sync(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    mode: Annotated[
        audit_words.Mode | None, typer.Option(help="How weights are synced; else as configured.")
    ] = None,
    server: Annotated[
        bool, typer.Option("--server", help="Sample from a vLLM server, not beside the trainer.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Audit again even if one exists.")] = False,
    data: DataOption = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Prove that sampler and trainer are one policy, or say why they aren't.

    Takes the model that GRPO would start from if the run has made it, else the start model. Exit
    code 1 when the audit fails.
    """
    request = Request(preset, from_run, assignments or [], None, data, store)
    record = audit_words.prepare_audit(
        request, mode, server=server, force=force, command=_command()
    )
    code = _start(store, record)
    audit_words.show_audit(request, record)
    raise typer.Exit(code)


@app.command()
def presets() -> None:
    """List the shipped presets."""
    from ratchet.config.presets import preset_gist, preset_names

    names = preset_names()
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:<{width}}  {preset_gist(name)}")


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect server.")] = 4200,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Start the Prefect UI on this machine; Ctrl-C stops it."""
    from flows.deployment.ui import ui as serve_until_stopped

    raise typer.Exit(serve_until_stopped(port, store.absolute()))


def _command() -> str:
    """The command line as it was typed."""
    return shlex.join(["ratchet", *sys.argv[1:]])


def _start(store: Path, record: RunRecord, *, here: bool = False) -> int:
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


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
