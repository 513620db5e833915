"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STORE = Path("artifacts")

Store = Annotated[
    Path,
    typer.Option("--store", envvar="RATCHET_STORE", help="Folder that artifacts are kept in."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A run (id, name, 'latest'), RUN/stage such as latest/filter, or an artifact's key.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="A shipped preset (`ratchet presets`) or a .toml file."),
]
FromRun = Annotated[
    str | None,
    typer.Option("--run", "-r", help="An earlier run: its id, its name, or 'latest'."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Change one setting; repeatable."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="RATCHET_DATA",
        help="Folder with local copies of the data sets (gsm8k/, svamp/, math500/ …), used in "
        "place of the hub.",
    ),
]
Here = Annotated[
    bool,
    typer.Option(
        "--here",
        help="Run it in this terminal's process and environment, even where `ratchet ui` would "
        "run it.",
    ),
]
