"""The command `resample`: one completion of a presample, drawn again.

What can be checked without torch is checked here, before `tasks.commands.resample` loads it.
"""

from __future__ import annotations

from functools import wraps
from typing import Annotated, Any

import typer

from flows.cli import options
from ratchet.errors import UserError
from ratchet.pipeline.request import open_store


def resample(
    ref: Annotated[
        str,
        typer.Argument(metavar="RUN/presample", help="A presample: RUN/presample, or its key."),
    ],
    question: Annotated[
        str, typer.Argument(metavar="QUESTION_ID", help="The question: the start of its id.")
    ],
    index: Annotated[int, typer.Argument(metavar="SAMPLE_INDEX", min=0, help="From 0 to k - 1.")],
    store: options.Store = options.DEFAULT_STORE,
) -> None:
    """Draw one completion of a presample again and say whether it is the same text.

    Repeats the whole call that made it, which is a shard. Exit code 1 when another text comes out.
    """
    from ratchet.store.lineage import find_artifact

    opened = open_store(store, must_exist=True)
    found = find_artifact(opened, ref)
    if found.manifest.stage != "presample":
        raise UserError(f"{found.ref} is no presample: name RUN/presample")
    for role, made in found.manifest.parents.items():
        if opened.find(made.stage, made.key) is None:
            raise UserError(f"its input '{role}' ({made.stage}/{made.key}) isn't in {opened.root}")
    from tasks.runtime.worker import set_environment

    set_environment()
    from tasks.commands.resample import engine_output_aside, words
    from tasks.commands.resample import resample as sample_again

    with engine_output_aside() as log:
        sampled = sample_again(opened, found.ref, question, index, log)
    print(words(sampled))
    raise typer.Exit(0 if sampled.is_same else 1)


@wraps(resample)
def redraw(*arguments: Any, **given: Any) -> None:
    """The name that the command had."""
    typer.echo("note: `ratchet redraw` is now `ratchet resample`", err=True)
    resample(*arguments, **given)
