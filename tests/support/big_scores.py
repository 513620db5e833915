"""Scores of many questions, and the filter stage on them in a process whose memory is measured.

Not a test module. `python -m tests.support.big_scores FOLDER QUESTIONS SAMPLES write|filter|whole`
writes the tables to FOLDER, filters them, or loads the scores at once for comparison. It prints as
JSON the peak of resident memory in MiB before and after, and the seconds it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.config.run import FilterConfig, GrpoConfig
from ratchet.store.schemas import schema
from tasks.stages import filter as stage
from tests.support.made_up import artifact, context

PIECE = 20_000  # questions written at once


def ids(start: int, stop: int) -> list[str]:
    """As long as real ones."""
    return [f"{index:020x}" for index in range(start, stop)]


def write(folder: Path, num_questions: int, num_samples: int) -> None:
    """The questions and scores tables, in pieces; samples of a question don't stand together."""
    for name in ("questions", "scores"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    skill_q = rng.beta(0.5, 0.7, num_questions)
    shape = schema("questions")
    with pq.ParquetWriter(folder / "questions" / "questions.parquet", shape) as out:
        for start in range(0, num_questions, PIECE):
            found = ids(start, min(start + PIECE, num_questions))
            texts = [f"What is {name}?" for name in found]
            columns = {name: pa.nulls(len(found), shape.field(name).type) for name in shape.names}
            columns |= {"question_id": found, "role": ["train"] * len(found), "question": texts}
            out.write_table(pa.table(columns | {"reference_solution": texts}, schema=shape))
    shape = schema("scores", ["reward_exact"])
    with pq.ParquetWriter(folder / "scores" / "scores.parquet", shape, compression="zstd") as out:
        for sample in range(num_samples):
            for start in range(0, num_questions, PIECE):
                found = ids(start, min(start + PIECE, num_questions))
                right = rng.random(len(found)) < skill_q[start : start + len(found)]
                columns = {
                    "question_id": found,
                    "sample_index": np.full(len(found), sample),
                    "status": ["ok"] * len(found),
                    "extracted": rng.integers(0, 10**6, len(found)).astype(str),
                    "strict": right,
                    "lenient": right,
                    "truncated": np.zeros(len(found), dtype=bool),
                    "num_tokens": rng.integers(1, 512, len(found)),
                    "reward_exact": right.astype(float),
                }
                out.write_table(pa.table(columns, schema=shape))


def peak_mib() -> float:
    """Most resident memory so far, MiB. Not `ru_maxrss`: that begins with what the process had
    that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    """See the module's docstring."""
    folder, num_questions, num_samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4] == "write":
        write(folder, num_questions, num_samples)
        return
    inputs = {
        "questions": artifact(folder / "questions", "decontaminate", {}),
        "scores": artifact(folder / "scores", "score", {}),
    }
    before, started = peak_mib(), time.perf_counter()
    if sys.argv[4] == "whole":
        table = pq.read_table(folder / "scores" / "scores.parquet")
        assert len(table) == num_questions * num_samples
    else:
        ctx = context(folder, inputs)
        summary = stage.run(ctx, filter=FilterConfig(), grpo=GrpoConfig()).summary
        assert sum(summary["roles"].values()) == num_questions
        assert summary["headroom"]["num_samples"] == num_questions * num_samples
    seconds = time.perf_counter() - started
    print(json.dumps({"before": before, "after": peak_mib(), "seconds": seconds}))


if __name__ == "__main__":
    main()
