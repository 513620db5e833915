"""Both warm-starts on the seedling, with questions it has not seen: they must help."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
    SftConfig,
    SourceConfig,
    SourceKind,
    WarmstartConfig,
)
from ratchet.questions.load import load_source
from ratchet.store.schemas import read_table
from ratchet.store.store import Artifact
from tasks.models.checkpoints import load_model, load_tokenizer
from tasks.runtime.context import StageContext
from tasks.sampling.engines.opening import engine_spec
from tasks.training.dev_check import EvalSet, greedy_answers
from tests.conftest import REPO
from tests.support.made_up import artifact, context
from tests.support.tiny_warmstart import run_opd, run_sft

pytestmark = pytest.mark.slow

SAMPLER = SamplerConfig(engine="transformers", max_completion_tokens=96)


def drawn(count: int, seed: int, role: str) -> list[dict[str, Any]]:
    source = SourceConfig(kind=SourceKind.SYMBOLIC, count=count, seed=seed)
    return [
        asdict(row) | {"role": role, "num_prompt_tokens": 0} for row in load_source(source, "train")
    ]


def strict_accuracy(model: Artifact, count: int = 200) -> float:
    """Greedy strict accuracy on `count` questions that no test trains on."""
    tokenizer = load_tokenizer(model)
    rows = drawn(count, seed=99, role="test")
    limit = SAMPLER.max_completion_tokens
    prompt = PromptConfig(format=PromptFormat.TAGS_SHORT)
    eval_set = EvalSet.of(rows, tokenizer, ModelConfig(), prompt, limit)
    spec = engine_spec(
        model,
        tokenizer,
        model_config=ModelConfig(),
        sampler=SAMPLER.model_copy(update={"max_num_seqs": 100}),
        max_prompt_tokens=max(map(len, eval_set.prompts)),
    )
    trained = load_model(model, dtype="float32", attention="eager")
    return eval_set.accuracy(greedy_answers(trained, eval_set, spec))[0]


def stage(folder: Path) -> StageContext:
    folder.mkdir()
    shutil.copytree(REPO / "data" / "seedling", folder / "model" / "checkpoint")
    inputs = {
        "model": artifact(folder / "model", "grpo", {}),
        "questions": artifact(
            folder / "questions", "questions", {"questions": drawn(256, seed=5, role="warmup")}
        ),
    }
    return context(folder, inputs)


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    """The context of a finished SFT stage."""
    ctx = stage(tmp_path_factory.mktemp("sft") / "stage")
    run_sft(
        ctx,
        SftConfig(epochs=2, learning_rate=3e-4),
        sampler=SAMPLER,
        warmstart=WarmstartConfig(method="sft", data="source"),
    )
    return ctx


def test_sft_raises_strict_accuracy(fine_tuned: StageContext) -> None:
    before = strict_accuracy(fine_tuned.inputs["model"])
    after = strict_accuracy(artifact(fine_tuned.out_dir, "warmstart_sft", {}))
    assert after > before + 0.03


def test_opd_comes_closer_to_a_better_teacher(fine_tuned: StageContext, tmp_path: Path) -> None:
    ctx = stage(tmp_path / "stage")
    run_opd(
        ctx,
        OpdConfig(
            teacher=str(fine_tuned.out_dir / "checkpoint"),
            steps=12,
            learning_rate=3e-4,
            batch_size=16,
            micro_batch_size=16,
        ),
        sampler=SAMPLER,
        warmstart=WarmstartConfig(method="opd", data="source"),
    )
    losses = read_table(ctx.out_dir / "metrics.parquet", "metrics").column("loss").to_pylist()
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
