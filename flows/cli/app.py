"""The command line: `ratchet --help`.

Commands check everything they can before they start anything, print one line for a mistake and
exit with 2. They start quickly because nothing heavy is imported here: flows run in a process of
their own (`python -m flows.run`), which also keeps this package free of imports from above.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli import audit as cli_audit
from flows.cli import benchmark as cli_benchmark
from flows.cli import browse as cli_browse
from flows.cli import compare as cli_compare
from flows.cli import export as cli_export
from flows.cli import resample as cli_redraw
from flows.cli import training as cli_training
from flows.cli import verify as cli_verify
from ratchet.errors import EXIT_USER_ERROR, UserError
from ratchet.pipeline import request as cli_plan

app = typer.Typer(
    help="Make a small language model verifiably better at maths.",
    epilog="Start with `ratchet run --preset demo`, then `ratchet runs` and `ratchet show latest`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
cli_browse.register(app)
cli_compare.register(app)
cli_export.register(app)
cli_redraw.register(app)
cli_training.register(app)
cli_verify.register(app)

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
StoreOption = cli_browse.StoreOption
HereOption = Annotated[
    bool,
    typer.Option(
        "--here",
        help="Run it in this terminal's process and environment, even where `ratchet ui` would "
        "run it.",
    ),
]


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
    store: StoreOption = cli_browse.DEFAULT_STORE,
    here: HereOption = False,
) -> None:
    """Run the whole pipeline: from questions to the report.

    What exists already is reused, so the same command continues a run that was interrupted.
    """
    request = cli_plan.Request(preset, from_run, assignments or [], name, data, store)
    record = cli_plan.prepare(request, targets=[], force=force or [], command=_command())
    cli_browse.tell_base(store, record)
    _start_flow(store, record.run_id, here)


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
    store: StoreOption = cli_browse.DEFAULT_STORE,
    here: HereOption = False,
) -> None:
    """Run one stage of an earlier run, with other settings if you like.

    What lies above it is reused; a setting that would change something above is refused.
    """
    request = cli_plan.Request(None, from_run, assignments or [], None, data, store)
    record = cli_plan.prepare_stage(request, stage_name, force, downstream, _command())
    cli_browse.tell_base(store, record)
    _start_flow(store, record.run_id, here)


@app.command()
def benchmark(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if it was done.")
    ] = False,
    data: DataOption = None,
    store: StoreOption = cli_browse.DEFAULT_STORE,
) -> None:
    """Measure prompt formats, thinking and decoding of a model; trains nothing.

    Set benchmark.formats, .thinking, .decoding, .role, .source and .limit, and model.path for
    another model.
    """
    request = cli_plan.Request(preset, from_run, assignments or [], None, data, store)
    record = cli_benchmark.prepare_benchmark(request, force=force, command=_command())
    code = _run_module("flows.run", "--store", str(store.absolute()), "--run", record.run_id)
    cli_benchmark.show_benchmark(store, record)
    raise typer.Exit(code)


@app.command()
def plan(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    data: DataOption = None,
    store: StoreOption = cli_browse.DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a run would do: what is reused, what runs, and why. Starts nothing."""
    request = cli_plan.Request(preset, from_run, assignments or [], None, data, store)
    cli_plan.show(request, as_json)


@app.command("audit-sync")
def audit_sync(
    preset: PresetOption = None,
    from_run: FromOption = None,
    assignments: SetOption = None,
    mode: Annotated[
        cli_audit.Mode | None, typer.Option(help="How weights are synced; else as configured.")
    ] = None,
    server: Annotated[
        bool, typer.Option("--server", help="Sample from a vLLM server, not beside the trainer.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Audit again even if one exists.")] = False,
    data: DataOption = None,
    store: StoreOption = cli_browse.DEFAULT_STORE,
) -> None:
    """Prove that sampler and trainer are one policy, or say why they aren't.

    Takes the model that GRPO would start from if the run has made it, else the start model. Exit
    code 1 when the audit fails.
    """
    request = cli_plan.Request(preset, from_run, assignments or [], None, data, store)
    record = cli_audit.prepare_audit(request, mode, server=server, force=force, command=_command())
    code = _run_module("flows.run", "--store", str(store.absolute()), "--run", record.run_id)
    cli_audit.show_audit(request, record)
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
    store: StoreOption = cli_browse.DEFAULT_STORE,
) -> None:
    """Start the Prefect UI on this machine; Ctrl-C stops it."""
    _start_module("flows.deployment.ui", "--port", str(port), "--store", str(store.absolute()))


def _command() -> str:
    """The command line as it was typed."""
    return shlex.join(["ratchet", *sys.argv[1:]])


def _start_flow(store: Path, run_id: str, here: bool) -> None:
    """Carry out a recorded run in its own process and exit as it does."""
    arguments = ["--store", str(store.absolute()), "--run", run_id]
    _start_module("flows.run", *arguments, *(["--here"] if here else []))


def _start_module(module: str, *arguments: str) -> None:
    """Run one of our modules in its own process and exit with its code.

    Ctrl-C reaches the child too (same process group), SIGTERM is passed on; we wait for it to
    clean up.
    """
    raise typer.Exit(_run_module(module, *arguments))


def _run_module(module: str, *arguments: str) -> int:
    """See `_start_module`; the exit code."""
    process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments])
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue
    return code if code >= 0 else 128 - code


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
