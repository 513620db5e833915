"""A scores table is filtered in memory that follows its questions, not its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
MOST_MIB = 250  # 200 were measured


def growth(folder: Path, what: str) -> float:
    """MiB by which resident memory grows at most, from before the work to its end."""
    command = [sys.executable, str(TESTS / "big_scores.py"), str(folder), "30000", "100", what]
    done = subprocess.run(
        command, cwd=TESTS.parent, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(TESTS.parent)},
    )  # fmt: skip
    if what == "write":
        return 0.0
    found = json.loads(done.stdout)
    return found["after"] - found["before"]


def test_three_million_scores_are_filtered_in_bounded_memory(tmp_path: Path) -> None:
    growth(tmp_path, "write")
    assert growth(tmp_path, "filter") < MOST_MIB
    assert growth(tmp_path, "whole") > MOST_MIB  # what loading the table alone would take
