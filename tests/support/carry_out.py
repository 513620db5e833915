"""The command line with one command more, which carries out a run that a test has recorded, as
`ratchet run` does with its own: `python -m tests.support.carry_out --store PATH --run ID`."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from flows.cli.app import app, main
from flows.cli.run import carry_out


@app.command("carry-out")
def carry_out_recorded(store: Path = Path(), run: str = "", here: bool = False) -> None:
    """Carry out a recorded run."""
    raise typer.Exit(carry_out(store, run, here=here))


if __name__ == "__main__":
    sys.argv.insert(1, "carry-out")
    main()
