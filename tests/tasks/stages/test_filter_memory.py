"""A scores table is filtered in memory that follows its questions, not its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

pytestmark = pytest.mark.slow

MOST_MIB = 250  # 200 were measured


def growth(folder: Path, what: str) -> float:
    """MiB by which resident memory grows at most, from before the work to its end."""
    command = [sys.executable, "-m", "tests.support.big_scores", str(folder), "30000", "100", what]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    if what == "write":
        return 0.0
    found = json.loads(done.stdout)
    return found["after"] - found["before"]


def test_three_million_scores_are_filtered_in_bounded_memory(tmp_path: Path) -> None:
    growth(tmp_path, "write")
    assert growth(tmp_path, "filter") < MOST_MIB
    assert growth(tmp_path, "whole") > MOST_MIB  # what loading the table alone would take
