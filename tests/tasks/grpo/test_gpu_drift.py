"""The drift runs on a GPU (`benchmarks/drift_gpu.sh`): what the machine allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.drift_runs import read
from tests.conftest import REPO

ROUNDING = {"adapter": 1e-4, "merged": 1e-4, "adapter-bf16": 2e-2, "adapter-server": 1e-4}
"""Mean drift, in nats per token, that rounding explains on a GPU."""


@pytest.mark.gpu
@pytest.mark.slow
def test_drift_stays_flat_on_a_gpu(tmp_path: Path) -> None:
    command = [str(REPO / "benchmarks" / "drift_gpu.sh"), str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, check=True)
    summary = (tmp_path / "summary.txt").read_text()
    assert "FAILED" not in summary, summary
    runs = read(tmp_path)
    for kind, limit in ROUNDING.items():
        assert max(row["drift_mean"] for row in runs[kind]) < limit, kind
        assert all(row["dropped_share"] == 0 for row in runs[kind]), kind
    stale = [row["drift_mean"] for row in runs["stock-100"]]
    assert stale[-1] > 10 * stale[0]
