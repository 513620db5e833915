"""The command line: `ratchet --help`.

Commands check everything they can before they start anything, print one line for a mistake and
exit with 2. They start quickly because nothing heavy is imported until a command is about to do
what needs it: Prefect, torch and engines are loaded inside the functions that call them.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flows.cli import (
    audit,
    benchmark,
    browse,
    compare,
    export,
    options,
    plan,
    resample,
    run,
    training,
    verify,
)
from ratchet import __version__
from ratchet.errors import EXIT_USER_ERROR, UserError

app = typer.Typer(
    help="Make a small language model verifiably better at maths.",
    epilog="Start with `ratchet run --preset demo`, then `ratchet runs` and `ratchet show latest`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    *(run.run, run.stage, plan.plan, benchmark.benchmark, audit.audit_sync),
    *(browse.runs, browse.show, browse.lineage, browse.report, compare.compare, export.export),
    *(training.rollouts, training.doctor, training.replay_batch, resample.resample, verify.verify),
):
    app.command()(command)
app.command("redraw", hidden=True)(resample.redraw)
rewards = typer.Typer(help="Look into the reward functions.", no_args_is_help=True)
rewards.command("audit")(verify.rewards_audit)
app.add_typer(rewards, name="rewards")


@rewards.callback()
def _rewards() -> None:
    """Look into the reward functions."""


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
    store: options.Store = options.DEFAULT_STORE,
) -> None:
    """Start the Prefect UI on this machine; Ctrl-C stops it."""
    from flows.deployment.ui import ui as serve_until_stopped

    raise typer.Exit(serve_until_stopped(port, store.absolute()))


def main() -> None:
    """Carry out the command line; ends with SystemExit."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def console_script() -> None:
    """Entry point of the console script."""
    try:
        main()
    except SystemExit as ended:
        if "vllm" not in sys.modules:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        # As in tasks.runtime.worker: no engine's exit handler shall hang a command that is done.
        os._exit(ended.code if isinstance(ended.code, int) else 0)


if __name__ == "__main__":
    console_script()
