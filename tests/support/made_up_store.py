"""Hand-made artifacts committed to a real store, and jobs on them. Not a test module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratchet.pipeline.stages import STAGES
from ratchet.store.code import code_version
from ratchet.store.runs import log_file
from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Artifact, Store
from tasks.runtime.job import InputRef, Job
from tests.support.made_up import Rows, artifact, question

FILTER_KEY = "fe" * 10


def commit(store: Store, stage: str, key: str, tables: dict[str, Rows]) -> Artifact:
    """Commit an artifact with these tables."""
    manifest = artifact(store.root / ".scratch", stage, {}, key=key).manifest
    with store.build(stage, key) as build:
        for name, rows in tables.items():
            write_table(build.out_dir / f"{name}.parquet", name, to_table(name, rows))
        return store.commit(build, manifest)


def score_rows(right: dict[str, str]) -> list[dict[str, Any]]:
    """Per question a string of samples: '+' right, '-' wrong."""
    return [
        {
            "question_id": question_id,
            "sample_index": index,
            "status": "ok",
            "extracted": "4",
            "strict": mark == "+",
            "lenient": mark == "+",
            "truncated": False,
            "num_tokens": 20,
        }
        for question_id, marks in right.items()
        for index, mark in enumerate(marks)
    ]


def filter_inputs(store: Store, right: dict[str, str]) -> dict[str, InputRef]:
    """Committed questions and scores for the filter stage."""
    questions = commit(
        store, "questions", "aa" * 10, {"questions": [question(name) for name in right]}
    )
    scores = commit(store, "score", "bb" * 10, {"scores": score_rows(right)})
    return {
        role: InputRef(stage=found.manifest.stage, key=found.manifest.key)
        for role, found in {"scores": scores, "questions": questions}.items()
    }


def filter_job(store: Store, inputs: dict[str, InputRef], **fields: Any) -> Job:
    """A job of the filter stage; `fields` override."""
    from ratchet.config.run import FilterConfig, GrpoConfig

    values: dict[str, Any] = {
        "store": store.root,
        "run_id": "test-run",
        "node": "filter",
        "stage": "filter",
        "key": FILTER_KEY,
        "run": STAGES["filter"].run,
        "sections": {
            "filter": FilterConfig().model_dump(mode="json"),
            "grpo": GrpoConfig(group_size=4).model_dump(mode="json"),
        },
        "fingerprints": {},
        "code_version": code_version(STAGES["filter"].module),
        "inputs": inputs,
        "seed": 0,
        "log_file": log_file(store, "test-run", "filter"),
    }
    return Job(**(values | fields))


def read_log(job: Job) -> str:
    """What the job's worker logged."""
    return Path(job.log_file).read_text(encoding="utf-8")
