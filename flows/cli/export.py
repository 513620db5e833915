"""The command `export`: a trained model as a Hugging Face folder with a model card.

What can be checked without torch is checked here; the work is done by `tasks.commands.export` in a
process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.browse import DEFAULT_STORE, StoreOption, open_store
from ratchet.errors import UserError

if TYPE_CHECKING:
    from ratchet.store.store import Artifact, Store


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(export)


def trained_model(store: Store, ref: str) -> Artifact:
    """The artifact of a training stage that `ref` names; a run stands for what RL made.

    UserError for one that holds no trained model."""
    from ratchet.store.lineage import find_artifact, names_a_run

    found = find_artifact(store, f"{ref}/grpo" if names_a_run(store, ref) else ref)
    if not (found.folder / "checkpoint").is_dir() or "model" not in found.manifest.parents:
        raise UserError(
            f"{found.ref} holds no trained model: name a run, RUN/warmstart or RUN/grpo"
        )
    return found


def export(
    ref: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run (its trained model), RUN/stage, or a key."),
    ],
    to: Annotated[Path, typer.Option("--to", help="New folder to write.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter in place of the merged model.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a trained model as a Hugging Face folder, loaded again and compared, with its card."""
    opened = open_store(store)
    found = trained_model(opened, ref)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} is in use: name a new or empty folder")
    command = [sys.executable, "-P", "-m", "tasks.commands.export", "--store", str(opened.root)]
    command += ["--artifact", found.ref, "--to", str(to.absolute())]
    code = subprocess.run([*command, "--adapter"] if adapter else command, check=False).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)
