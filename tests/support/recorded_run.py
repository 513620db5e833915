"""Small real runs recorded in a store, for tests of the flows. Not a test module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ratchet.pipeline.request import Request, prepare
from ratchet.store.runs import RunRecord
from ratchet.store.store import Store
from tests.conftest import REPO

SMALL = (
    'questions.train=[{kind="symbolic", count=20, seed=1}]',
    'questions.dev=[{kind="symbolic", count=6, seed=2}]',
    'questions.test=[{kind="symbolic", count=6, seed=3}]',
)


def record(
    store: Store, targets: list[str], *settings: str, force: list[str] | None = None
) -> RunRecord:
    """Record a small run of the demo that brings `targets` about."""
    request = Request("demo", None, [*SMALL, *settings], None, None, store.root)
    return prepare(request, targets=targets, force=force or [], command="ratchet run (test)")


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Environment of a run with a Prefect home of its own and no server to find."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    kept.pop("RATCHET_PRIVATE_SERVER", None)
    return kept | {"PREFECT_HOME": str(home)} | extra


def start(module: str, env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start one of our modules, its output captured and Ctrl-C working."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        # A test run in the background has Ctrl-C ignored, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=env,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_arguments(store: Store, found: RunRecord) -> list[str]:
    """Arguments of `tests.support.carry_out`."""
    return ["--store", str(store.root), "--run", found.run_id]


def states(found: RunRecord) -> dict[str, Any]:
    """State by node, those that weren't needed left out."""
    return {name: node.state.value for name, node in found.nodes.items() if node.state != "pending"}
