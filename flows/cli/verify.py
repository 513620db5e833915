"""Commands about the verifier and the rewards: `verify` and `rewards audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ratchet.errors import UserError


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(verify)
    rewards = typer.Typer(help="Look into the reward functions.", no_args_is_help=True)
    rewards.command()(audit)
    app.add_typer(rewards, name="rewards")

    @rewards.callback()
    def _rewards() -> None:
        """Look into the reward functions."""


def verify(
    in_path: Annotated[
        Path | None, typer.Option("--in", help="JSONL with id, gold, completion [, style].")
    ] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", help="JSONL with one verdict per row, same order.")
    ] = None,
    style: Annotated[
        Literal["tags", "hash", "boxed", "plain"],
        typer.Option(help="Where the answer must stand; a row's own style wins."),
    ] = "tags",
    self_test: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Grade the grader on a source: name, file or folder."),
    ] = None,
) -> None:
    """Check answers against golds, or grade the verifier itself with --self-test."""
    from flows.cli import verify_files as verify_cli

    if self_test is not None:
        verify_cli.self_test(self_test)
    elif in_path is None or out_path is None:
        raise UserError("give --in and --out, or --self-test SOURCE")
    else:
        verify_cli.verify_file(in_path, out_path, style)


def audit() -> None:
    """Show what each known exploit would earn, and which reward pays for it."""
    from flows.cli import verify_files as verify_cli

    verify_cli.rewards_audit()
