"""Hand-made artifacts and contexts for tests of single stages. Not a test module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratchet.store.manifest import Manifest
from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Artifact, Store
from tasks.runtime.context import StageContext

Rows = list[dict[str, Any]]


def artifact(folder: Path, stage: str, tables: dict[str, Rows], **fields: Any) -> Artifact:
    """An artifact with these tables; `fields` override the manifest's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        write_table(folder / f"{name}.parquet", name, to_table(name, rows))
    values = {
        "stage": stage,
        "node": stage,
        "key": "0123456789abcdef0123",
        "run_id": "test-run",
        "config": {},
        "fingerprints": {},
        "parents": {},
        "code_version": "c0de",
        "packages": {"trl": "1.16.0"},
        "git_commit": None,
        "seed": 0,
        "host": "testhost",
        "device": "cpu",
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_seconds": 1.0,
        "rows": {name: len(rows) for name, rows in tables.items()},
        "files": {},
        "content": "",
        "summary": {},
        "markdown": "",
    }
    return Artifact(folder, Manifest(**(values | fields)))


def context(tmp_path: Path, inputs: dict[str, Artifact], seed: int = 0) -> StageContext:
    """A context whose output goes to `tmp_path/out`."""
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    return StageContext(
        node="test",
        key="0123456789abcdef0123",
        run_id="test-run",
        seed=seed,
        store=Store(tmp_path / "store"),
        inputs=inputs,
        out_dir=out,
        work_dir=work,
        emit=lambda event: None,
    )


def question(question_id: str, **fields: Any) -> dict[str, Any]:
    """One row of a questions table."""
    return {
        "question_id": question_id,
        "source": "made-up",
        "split": "train",
        "role": "train",
        "question": f"What is {question_id}?",
        "gold": "4",
        "reference_solution": "2 + 2 = <<2+2=4>>4\n#### 4",
        "difficulty": 1.0,
        "band": "1",
        "num_prompt_tokens": 10,
    } | fields
