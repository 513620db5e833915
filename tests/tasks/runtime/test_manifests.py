"""What a manifest says about where and from what an artifact was made."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Store
from tasks.runtime import manifests
from tasks.runtime.context import StageResult
from tasks.runtime.job import Job


def job(store: Store, key: str, stage: str = "score") -> Job:
    return Job(
        store=store.root,
        run_id="r",
        node="score",
        stage=stage,
        key=key,
        run="tasks.stages.score:run",
        sections={"prompt": {"format": "tags"}},
        fingerprints={"prompt": "f"},
        code_version="c",
        inputs={},
        seed=7,
        log_file=store.root / "log",
        prefect={"flow_run": "x"},
    )


def test_manifest_of_a_stage_is_complete(tmp_path: Path) -> None:
    store = Store(tmp_path)
    result = StageResult(summary={"num": 2}, markdown="two", sampled_tokens=5, device_seconds=1.5)
    with store.build("score", "k1") as build:
        rows = [{"step": 1}, {"step": 2}]
        write_table(build.out_dir / "metrics.parquet", "metrics", to_table("metrics", rows))
        manifest = manifests.new_manifest(
            job(store, "k1"), result, {}, build.out_dir, time.time() - 3
        )
        made = store.commit(build, manifest)
    found = store.get("score", "k1").manifest
    assert found == made.manifest
    assert found.rows == {"metrics": 2}
    assert 3.0 <= found.duration_seconds < 60
    assert found.packages["pyarrow"] == version("pyarrow")
    assert found.started_at.endswith("+00:00")
    assert list(found.files) == ["metrics.parquet"]
    assert (found.sampled_tokens, found.device_seconds, found.seed) == (5, 1.5, 7)
    assert found.config == {"prompt": {"format": "tags"}}
    assert found.prefect == {"flow_run": "x"}
    assert store.damage(made) is None


def test_inputs_are_recorded_with_their_content(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.build("presample", "k1") as build:
        (build.out_dir / "x").write_text("1")
        first = store.commit(
            build,
            manifests.new_manifest(
                job(store, "k1", "presample"), StageResult(), {}, build.out_dir, time.time()
            ),
        )
    second = manifests.new_manifest(
        job(store, "k2"), StageResult(), {"in": first}, tmp_path, time.time()
    )
    assert second.parents["in"].content == first.manifest.content
    assert (second.parents["in"].stage, second.parents["in"].key) == ("presample", "k1")


def test_commit_is_this_repositorys() -> None:
    head = subprocess.run(
        ["git", "-C", str(manifests.ROOT), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if head.returncode:
        pytest.skip("not a git checkout")
    found = manifests.git_commit()
    assert found is not None
    assert found.removesuffix("-dirty") == head.stdout.strip()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, tasks.runtime.manifests as m; m.device_description(); m.package_versions();"
        "print([n for n in ('torch','transformers','vllm','prefect','pandas') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
