"""Presampling with both engines: kills, a growing k, strange shards, a sample drawn again."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from ratchet.config.run import PresampleConfig
from ratchet.errors import UserError
from ratchet.models.check import SEEDLING, packaged_model_dir
from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Artifact, Store
from tasks.commands.resample import redraw, words
from tasks.runtime.context import StageContext, StageResult
from tasks.stages import presample
from tests.conftest import REPO
from tests.support.made_up import artifact, context
from tests.tasks.sampling.test_shards import ALONE, MODEL, PROMPT, SAMPLER, rows

NO_VLLM = importlib.util.find_spec("vllm") is None
VLLM = pytest.param("vllm", marks=pytest.mark.skipif(NO_VLLM, reason="vLLM isn't installed"))
QUESTIONS = rows(6)
SETTINGS = PresampleConfig(k=8, k_block=4, shard_questions=3)
"""Four shards of twelve completions."""


@dataclass(frozen=True)
class Presample:
    """A presample that ran."""

    ctx: StageContext
    engine: str
    result: StageResult

    def rows(self) -> list[dict[str, Any]]:
        return artifact(self.ctx.out_dir, "presample", {}).table("completions").to_pylist()

    @property
    def shards(self) -> tuple[int, int]:
        """All of them and those that were there."""
        summary = self.result.summary
        return summary["num_shards"], summary["num_shards_reused"]


def committed(store: Store, stage: str, **fields: Any) -> Artifact:
    """A 'model' or 'questions' artifact that is truly in the store."""
    manifest = artifact(store.root / ".scratch", stage, {}, **fields).manifest
    with store.build(stage, manifest.key) as build:
        if stage == "model":
            facts = {"path": str(packaged_model_dir(SEEDLING)), "revision": None, "context": 256}
            (build.out_dir / "model.json").write_text(json.dumps(facts))
        else:
            table = to_table("questions", QUESTIONS)
            write_table(build.out_dir / "questions.parquet", "questions", table)
        return store.commit(build, manifest)


def stage_context(folder: Path, name: str) -> StageContext:
    """A context of its own folder on the store in `folder`."""
    store = Store(folder / "store")
    dropped = {"train": {"prompt_too_long": 3, "duplicate": 1}}
    loaded = committed(store, "questions", key="11" * 10, summary={"dropped": dropped})
    clean = committed(store, "questions", parents={"questions": loaded.as_parent()})
    (folder / name).mkdir()
    made = context(folder / name, {"model": committed(store, "model"), "questions": clean})
    return replace(made, store=store)


def run(folder: Path, name: str, engine: str, k: int = 8, ctx: StageContext | None = None) -> Any:
    ctx = ctx or stage_context(folder, name)
    # As many sequences at once as a question has samples, so that a shard has a middle.
    sampler = SAMPLER.model_copy(update={"engine": engine, "max_num_seqs": 4})
    settings = SETTINGS.model_copy(update={"k": k})
    result = presample.run(
        ctx, model=MODEL, prompt=PROMPT, sampler=sampler, workers=ALONE, presample=settings
    )
    return Presample(ctx, engine, result)


@pytest.fixture(scope="module", params=["transformers", VLLM])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Presample:
    """k = 8 at once, undisturbed."""
    found: Presample = run(tmp_path_factory.mktemp(request.param), "straight", request.param)
    assert found.shards == (4, 0)
    return found


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, ".")
from tasks.sampling import progress as sampling_progress
from tests.tasks.stages.test_presample import run, stage_context

def kill_in_the_middle_of_the_second_shard(event):
    if event["event"] == "progress" and 12 < event["done"] < 24:
        os.kill(os.getpid(), signal.SIGKILL)

sampling_progress.PROGRESS_SECONDS = 0.0  # every event
folder, engine = Path(sys.argv[1]), sys.argv[2]
ctx = replace(stage_context(folder, "killed"), emit=kill_in_the_middle_of_the_second_shard)
run(folder, "killed", engine, 4, ctx)
"""


@pytest.mark.slow
def test_killed_in_a_shard_then_finished_then_grown_is_as_if_drawn_at_once(
    straight: Presample, tmp_path: Path
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), straight.engine], cwd=REPO, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "store" / "samples").glob("*/manifest.json"))) == 1
    four = run(tmp_path, "four", straight.engine, 4)
    assert four.shards == (2, 1)
    assert four.rows() == [row for row in straight.rows() if row["sample_index"] < 4]
    eight = run(tmp_path, "eight", straight.engine)
    assert eight.shards == (4, 2)
    assert eight.rows() == straight.rows()
    order = [(row["question_id"], row["sample_index"]) for row in eight.rows()]
    assert order == [(row["question_id"], index) for row in QUESTIONS for index in range(8)]
    later = [row["num_tokens"] for row in straight.rows() if row["sample_index"] >= 4]
    assert eight.result.sampled_tokens == sum(later)
    assert len({row["seed"] for row in straight.rows()}) == 4


@pytest.mark.slow
def test_what_the_user_sees(straight: Presample) -> None:
    assert straight.result.summary["num_too_long"] == 3
    page = straight.result.markdown
    assert "**48 completions** of 6 questions" in page
    assert "Dropped at the door for a prompt over `questions.max_prompt_tokens`: 3." in page
    assert straight.result.summary["tokens_per_second"] > 0


@pytest.mark.slow
def test_a_shard_of_another_model_in_the_place_of_one_is_made_again(tmp_path: Path) -> None:
    first = run(tmp_path, "first", "transformers", 4)
    other = stage_context(tmp_path, "other")
    model = committed(other.store, "model", key="22" * 10)
    other = replace(other, inputs=dict(other.inputs) | {"model": model})
    theirs = run(tmp_path, "other", "transformers", 4, other)
    assert theirs.shards == (2, 0), "nothing of another model is reused"

    shards = {
        found.manifest.key: found.manifest.parents["model"].key
        for found in first.ctx.store.artifacts()
        if found.manifest.stage == "samples"
    }
    own = next(key for key, name in shards.items() if name != model.manifest.key)
    foreign = next(key for key, name in shards.items() if name == model.manifest.key)
    folder = first.ctx.store.folder("samples", own)
    shutil.rmtree(folder)
    shutil.copytree(first.ctx.store.folder("samples", foreign), folder)
    messages: list[str] = []
    ctx = replace(stage_context(tmp_path, "again"), emit=lambda event: messages.append(str(event)))
    again = run(tmp_path, "again", "transformers", 4, ctx)
    assert again.shards == (2, 1)
    assert any(f"holds another shard ({foreign}): it is made again" in said for said in messages)
    assert again.rows() == first.rows()


def kept(made: Presample, key: str, completions: list[dict[str, Any]]) -> Artifact:
    """A presample in the store, with these completions."""
    ctx, sampler = made.ctx, SAMPLER.model_copy(update={"max_num_seqs": 4, "engine": made.engine})
    sections = {"model": MODEL, "prompt": PROMPT, "sampler": sampler, "presample": SETTINGS}
    manifest = artifact(
        ctx.out_dir.parent,
        "presample",
        {},
        key=key,
        parents={role: found.as_parent() for role, found in ctx.inputs.items()},
        config={name: section.model_dump(mode="json") for name, section in sections.items()},
    ).manifest
    with ctx.store.build("presample", key) as build:
        table = to_table("completions", completions)
        write_table(build.out_dir / "completions.parquet", "completions", table)
        return ctx.store.commit(build, manifest)


@pytest.mark.slow
@pytest.mark.parametrize("straight", ["transformers"], indirect=True)
def test_one_sample_is_drawn_again(straight: Presample) -> None:
    store = straight.ctx.store
    made = kept(straight, "ab" * 10, straight.rows())
    wanted = straight.rows()[4 * 8 + 6]
    arguments = [wanted["question_id"], "6", "--store", str(store.root)]
    done = CliRunner().invoke(app, ["redraw", made.ref, *arguments])
    assert done.exit_code == 0, done.output
    assert "question train-4, sample 6: model" in done.stdout
    assert "3 questions × 4 samples, drawn again" in done.stdout
    assert done.stdout.rstrip().endswith("token for token:\n\n" + wanted["text"].rstrip())

    changed = straight.rows()
    changed[4 * 8 + 6]["token_ids"][2] += 1
    other = kept(straight, "cd" * 10, changed)
    found = redraw(store, other.ref, wanted["question_id"], 6, lambda event: None)
    assert not found.is_same
    assert "another text, from token 3 on. Made with: device cpu, now " in words(found)


@pytest.mark.slow
@pytest.mark.parametrize("straight", ["transformers"], indirect=True)
def test_what_can_not_be_drawn_again(straight: Presample) -> None:
    store = straight.ctx.store
    made = kept(straight, "ef" * 10, straight.rows())
    with pytest.raises(UserError, match="'train-' is the start of 6 questions in presample/ef"):
        redraw(store, made.ref, "train-", 0, lambda event: None)
    with pytest.raises(UserError, match="'x' is the start of no question"):
        redraw(store, made.ref, "x", 0, lambda event: None)
    with pytest.raises(UserError, match="question train-1 has samples 0 to 7, and no 8"):
        redraw(store, made.ref, "train-1", 8, lambda event: None)
    other_seed = [row | {"seed": row["seed"] + 1} for row in straight.rows()]
    strange = kept(straight, "fe" * 10, other_seed)
    with pytest.raises(UserError, match="was sampled with other prompts than this version"):
        redraw(store, strange.ref, "train-1", 0, lambda event: None)
    done = CliRunner().invoke(app, ["redraw", "questions/11", "a", "0", "--store", str(store.root)])
    assert isinstance(done.exception, UserError)
    assert "is no presample: name RUN/presample" in str(done.exception)
