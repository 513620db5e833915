"""The command `redraw`: one completion of a presample, drawn again.

What can be checked without torch is checked here; the work is done by `tasks.commands.resample` in
a process of its own, which prints events.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.browse import DEFAULT_STORE, StoreOption, open_store
from ratchet.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(redraw)


def redraw(
    ref: Annotated[
        str,
        typer.Argument(metavar="RUN/presample", help="A presample: RUN/presample, or its key."),
    ],
    question: Annotated[
        str, typer.Argument(metavar="QUESTION_ID", help="The question: the start of its id.")
    ],
    index: Annotated[int, typer.Argument(metavar="SAMPLE_INDEX", min=0, help="From 0 to k - 1.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Draw one completion of a presample again and say whether it is the same text.

    Repeats the whole call that made it, which is a shard. Exit code 1 when another text comes out.
    """
    from ratchet.store.lineage import find_artifact

    opened = open_store(store)
    found = find_artifact(opened, ref)
    if found.manifest.stage != "presample":
        raise UserError(f"{found.ref} is no presample: name RUN/presample")
    for role, made in found.manifest.parents.items():
        if opened.find(made.stage, made.key) is None:
            raise UserError(f"its input '{role}' ({made.stage}/{made.key}) isn't in {opened.root}")
    with tempfile.NamedTemporaryFile(prefix="ratchet-redraw-", suffix=".log", delete=False) as log:
        command = [
            sys.executable,
            "-P",
            "-m",
            "tasks.commands.resample",
            "--store",
            str(opened.root),
        ]
        command += ["--artifact", found.ref, "--question", question, "--sample", str(index)]
        command += ["--log", log.name]
    last = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = json.loads(line)
            if last["event"] == "log":
                print(last["message"], file=sys.stderr)
    if last.get("event") == "error":
        raise UserError(last["message"])
    if last.get("event") != "done":
        raise typer.Exit(_crashed(Path(log.name)))
    print(last["message"])
    Path(log.name).unlink()
    raise typer.Exit(process.returncode)


def _crashed(log: Path) -> int:
    """Say that the process ended without a word; the exit code."""
    print(f"error: the process that draws ended before it was done; see {log}", file=sys.stderr)
    return 1
