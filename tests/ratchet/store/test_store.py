"""The store: atomic commits, reuse, damage, locks, takeover, kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.errors import UserError
from ratchet.store.keys import artifact_key, canonical_json, file_hash
from ratchet.store.lineage import ancestry, find_artifact
from ratchet.store.lock import hold, is_held
from ratchet.store.manifest import MANIFEST, Manifest, ParentRecord
from ratchet.store.runs import NodeRecord, RunRecord, create_run, load_run
from ratchet.store.schemas import read_table, to_table, write_table
from ratchet.store.store import Artifact, Store
from tests.conftest import REPO


def manifest(stage: str, key: str, parents: dict[str, ParentRecord] | None = None) -> Manifest:
    return Manifest(
        stage=stage,
        node=stage,
        key=key,
        run_id="run-1",
        config={},
        fingerprints={},
        parents=parents or {},
        code_version="c",
        packages={},
        git_commit=None,
        seed=0,
        host="h",
        device="cpu",
        started_at="2026-01-01T00:00:00+00:00",
        duration_seconds=1.0,
        rows={},
        files={},
        content="",
        summary={},
        markdown="",
    )


def make(
    store: Store, stage: str, key: str, text: str, parents: dict[str, ParentRecord] | None = None
) -> Artifact:
    with store.lock(stage, key, print), store.build(stage, key) as build:
        (build.out_dir / "sub").mkdir()
        (build.out_dir / "sub" / "file.txt").write_text(text)
        return store.commit(build, manifest(stage, key, parents))


def test_keys_depend_on_every_part_and_not_on_order() -> None:
    parts = ("s", {"a": 1, "b": 2}, {"f": "x"}, {"role": "k"}, "code", 0)
    key = artifact_key(*parts)
    assert key == artifact_key("s", {"b": 2, "a": 1}, {"f": "x"}, {"role": "k"}, "code", 0)
    for position, other in enumerate(("t", {"a": 1}, {"f": "y"}, {"role": "l"}, "new", 1)):
        changed = [*parts[:position], other, *parts[position + 1 :]]
        assert artifact_key(*changed) != key


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError):
        canonical_json(float("nan"))


def test_commit_records_every_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = make(store, "filter", "k1", "hello")
    assert made.manifest.files["sub/file.txt"].num_bytes == 5
    assert made.manifest.files["sub/file.txt"].sha256 == file_hash(made.path("sub/file.txt"))
    assert [path.name for path in (tmp_path / "filter").iterdir()] == ["k1"]
    assert store.get("filter", "k1").manifest == made.manifest


def test_an_exception_leaves_no_artifact_but_keeps_the_work_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError), store.build("grpo", "k") as build:
        (build.out_dir / "x").write_text("x")
        (build.work_dir / "checkpoint").write_text("step 3")
        raise RuntimeError
    assert store.find("grpo", "k") is None
    with store.build("grpo", "k") as build:
        assert (build.work_dir / "checkpoint").read_text() == "step 3"
        assert list(build.out_dir.iterdir()) == []
        store.commit(build, manifest("grpo", "k"))
    assert [path.name for path in (tmp_path / "grpo").iterdir()] == ["k"]


@pytest.mark.parametrize("fault", ["changed", "cut", "gone"])
def test_damage_is_noticed_named_and_mended(tmp_path: Path, fault: str) -> None:
    store = Store(tmp_path)
    file = make(store, "score", "k", "hello").path("sub/file.txt")
    if fault == "changed":
        file.write_text("hellO")
    elif fault == "cut":
        file.write_text("hell")
    else:
        file.unlink()
    said: list[str] = []
    assert store.reusable("score", "k", said.append) is None
    assert "score/k is damaged (sub/file.txt" in said[0]
    make(store, "score", "k", "hello")
    assert store.reusable("score", "k", said.append) is not None
    assert len(said) == 1


def test_an_artifact_made_from_a_replaced_input_is_not_reused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    parent = make(store, "score", "p", "one")
    make(store, "filter", "c", "child", {"scores": parent.as_parent()})
    assert store.reusable("filter", "c", print) is not None
    make(store, "score", "p", "two")
    said: list[str] = []
    assert store.reusable("filter", "c", said.append) is None
    assert "another 'scores'" in said[0]
    tree = ancestry(store, "filter", "c")
    assert [(item.role, item.stale) for item in tree.parents] == [("scores", True)]


def test_refs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    make(store, "score", "abc1", "x")
    make(store, "filter", "abd2", "x")
    assert find_artifact(store, "abc").ref == "score/abc1"
    assert find_artifact(store, "filter/ab").ref == "filter/abd2"
    with pytest.raises(UserError, match="several artifacts: "):
        find_artifact(store, "ab")
    with pytest.raises(UserError, match="names no artifact"):
        find_artifact(store, "zzz")


def test_latest_with_a_node_is_the_newest_run_that_has_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    make(store, "grpo", "aaa1", "x")
    make(store, "filter", "bbb1", "x")
    for name, created, keys in (
        ("whole", "2026-01-01", {"filter": "ccc1", "grpo": "aaa1"}),
        ("part", "2026-01-02", {"filter": "bbb1", "grpo": "ddd1"}),
    ):
        nodes = {stage: NodeRecord(stage=stage, key=key) for stage, key in keys.items()}
        create_run(
            store,
            RunRecord(
                run_id=name,
                name=name,
                created_at=created,
                config={},
                command="",
                targets=["filter"],
                nodes=nodes,
            ),
        )
    measured = RunRecord(
        run_id="measured",
        name="measured",
        created_at="2026-01-03",
        config={},
        command="",
        targets=["benchmark"],
        nodes={},
    )
    create_run(store, measured)
    assert load_run(store, "latest").run_id == "part"
    assert find_artifact(store, "latest/filter").ref == "filter/bbb1"
    assert find_artifact(store, "latest/grpo").ref == "grpo/aaa1"
    with pytest.raises(UserError, match=r"has not been made.*newest that has one is whole/grpo"):
        find_artifact(store, "part/grpo")


def test_a_lock_is_exclusive_between_threads_and_tells_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    order: list[str] = []
    waits: list[str] = []

    def second() -> None:
        with hold(path, waits.append):
            order.append("second")

    with hold(path, waits.append):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.5)
        order.append("first")
    thread.join(timeout=5)
    assert order == ["first", "second"]
    assert waits == [f"waiting for process {os.getpid()} on {os.uname().nodename}"]


HOLDER = """
import sys, time
from pathlib import Path
from ratchet.store.lock import hold
with hold(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_owner_gives_the_lock_up_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    owner = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    start = time.monotonic()
    with hold(path, print):
        assert time.monotonic() - start < 2


ORPHAN = """
import os, sys, time
from pathlib import Path
from ratchet.store.lock import hold
with hold(Path(sys.argv[1]), print):
    if os.fork() == 0:
        os.close(1)
        time.sleep(20)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_child_that_outlives_a_dead_owner_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    owner = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, path], stdout=subprocess.PIPE, start_new_session=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    start = time.monotonic()
    try:
        while is_held(path):  # until the child, which begins when it likes, lets go of it
            assert time.monotonic() - start < 2
            time.sleep(0.01)
        with hold(path, print):
            assert time.monotonic() - start < 2
            assert is_held(path)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)


BUILDER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.ratchet.store.test_store import make
from ratchet.store.store import Store
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    make(store, "score", "k", "x" * 200_000)
"""


def test_kill_9_at_any_moment_leaves_a_whole_artifact_or_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    whole = 0
    for attempt in range(8):
        builder = subprocess.Popen(
            [sys.executable, "-c", BUILDER, tmp_path, REPO],
            stdout=subprocess.PIPE,
        )
        assert builder.stdout is not None
        builder.stdout.readline()
        time.sleep(0.02 + 0.013 * attempt)
        builder.kill()
        builder.wait()
        found = store.find("score", "k")
        if found is not None:
            whole += 1
            assert store.damage(found) is None
            assert found.path("sub/file.txt").read_text() == "x" * 200_000
    made = make(store, "score", "k", "end")
    assert made.path("sub/file.txt").read_text() == "end"
    assert [path.name for path in (tmp_path / "score").iterdir()] == ["k"]
    assert whole > 0


def test_tables_refuse_strange_columns_versions_and_kinds(tmp_path: Path) -> None:
    row = {"question_id": "q", "num_samples": 8, "pass_rate_lenient": 0.5}
    write_table(tmp_path / "s.parquet", "selection", to_table("selection", [row]))
    assert read_table(tmp_path / "s.parquet", "selection")["num_samples"].to_pylist() == [8]
    with pytest.raises(ValueError, match="has no column 'nonsense'"):
        to_table("selection", [{"nonsense": 1}])
    with pytest.raises(UserError, match="is a table 'selection', not 'scores'"):
        read_table(tmp_path / "s.parquet", "scores")
    table = pa.table({"x": [1]})
    pq.write_table(
        table.replace_schema_metadata({"ratchet.table": "scores", "ratchet.version": "99"}),
        tmp_path / "new.parquet",
    )
    with pytest.raises(UserError, match="version 99, this Ratchet reads version 1"):
        read_table(tmp_path / "new.parquet", "scores")
    pq.write_table(table, tmp_path / "foreign.parquet")
    with pytest.raises(UserError, match="no table of ours"):
        read_table(tmp_path / "foreign.parquet", "scores")


def test_columns_that_were_renamed_are_read_under_their_new_names(tmp_path: Path) -> None:
    row = {"variant": "rl", "question_id": "q1", "strict": True}
    write_table(tmp_path / "new.parquet", "eval", to_table("eval", [row]))
    table = read_table(tmp_path / "new.parquet", "eval")
    names = ["arm" if name == "variant" else name for name in table.column_names]
    meta = {"ratchet.table": "eval", "ratchet.version": "1"}
    pq.write_table(
        table.rename_columns(names).replace_schema_metadata(meta), tmp_path / "old.parquet"
    )
    assert read_table(tmp_path / "old.parquet", "eval").to_pylist() == table.to_pylist()
    chosen = read_table(tmp_path / "old.parquet", "eval", ["variant", "strict"])
    assert chosen.to_pylist() == [{"variant": "rl", "strict": True}]


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = make(store, "score", "k", "x")
    content = json.loads((made.folder / MANIFEST).read_text())
    content["format_version"] = 99
    (made.folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match="version 99"):
        store.find("score", "k")
