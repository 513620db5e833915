"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the public data sets and verifier cases (`RATCHET_SHARED`)."""
    root = Path(os.environ.get("RATCHET_SHARED", REPO.parent / "shared"))
    if not (root / "data").is_dir():
        pytest.skip(f"no data sets at {root}: set RATCHET_SHARED to a folder that has them")
    return root


@pytest.fixture(autouse=True)
def rendezvous_ends_with_the_test() -> Iterator[None]:
    """A colocated engine leaves behind where its processes meet. A process that a later test
    starts would take that for its own and want the port that this one still holds."""
    yield
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module")
def engine_environment() -> Iterator[None]:
    """A colocated engine sets variables for its own process; they end with the module."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if shutil.which("nvidia-smi") is not None:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
