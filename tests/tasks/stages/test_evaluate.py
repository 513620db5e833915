"""Evaluation as a whole: one checkpoint twice, another model beside it, and how they compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import EvaluateConfig
from ratchet.prompts import OPENING_TAG
from ratchet.store.store import Artifact, Store
from tasks.runtime.context import StageContext
from tasks.stages import compare, evaluate
from tasks.stages.evaluate import prefilled_part
from tests.support.made_up import artifact, context
from tests.tasks.sampling.test_shards import ALONE, MODEL, PROMPT, SAMPLER, rows, stage_context

QUESTIONS = rows(24, "test")
SETTINGS = EvaluateConfig(samples=2)


def evaluated(tmp_path: Path, name: str, engine: str) -> tuple[StageContext, Artifact]:
    """The seedling's answers, sampled into a store of their own so that nothing is shared."""
    sampler = SAMPLER.model_copy(update={"engine": engine, "max_completion_tokens": 32})
    ctx = stage_context(tmp_path, name, QUESTIONS)
    ctx = replace(ctx, store=Store(tmp_path / name / "store"), node="evaluate.x")
    result = evaluate.run(
        ctx, model=MODEL, prompt=PROMPT, sampler=sampler, workers=ALONE, evaluate=SETTINGS
    )
    config = {
        section: part.model_dump(mode="json")
        for section, part in (
            ("model", MODEL), ("prompt", PROMPT), ("sampler", sampler), ("evaluate", SETTINGS),
        )
    }  # fmt: skip
    assert result.sampled_tokens > 0
    return ctx, artifact(ctx.out_dir, "evaluate", {}, config=config, summary=result.summary)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_one_checkpoint_evaluated_twice_gives_identical_tables(tmp_path: Path, engine: str) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    first_ctx, first = evaluated(tmp_path, "first", engine)
    _, second = evaluated(tmp_path, "second", engine)
    table = first.table("eval")
    greedy = [row for row in table.to_pylist() if row["decoding"] == "greedy"]
    assert len(greedy) == 24
    assert sum(row["lenient"] for row in greedy) > 0, "the seedling solves something"
    assert second.table("eval").equals(table)

    sources: list[dict[str, Any]] = [
        {"kind": "symbolic", "name": name, "templates": "seen"} for name in ("symbolic", "other")
    ]
    asked = artifact(
        tmp_path / "asked",
        "questions",
        {"questions": QUESTIONS},
        config={"questions": {"test": sources}},
    )
    (tmp_path / "compare").mkdir()
    inputs = {"questions": asked, "baseline": first, "rl": second}
    result = compare.run(context(tmp_path / "compare", inputs), evaluate=SETTINGS)
    assert result.summary["outcome"] == "inside the noise"
    assert result.summary["num_changed_listed"] == 0
    assert first_ctx.store.root != tmp_path / "store"


def test_the_opening_tag_is_told_from_the_models_own_template(tmp_path: Path) -> None:
    # a model whose chat template begins the answer, beside one whose template doesn't
    import json
    import shutil

    from ratchet.models.check import SEEDLING, packaged_model_dir

    plain = stage_context(tmp_path, "plain", QUESTIONS[:1]).inputs["model"]
    assert prefilled_part(plain, "What is 2 + 2?", MODEL, PROMPT) == ""
    folder = tmp_path / "prefilling"
    shutil.copytree(packaged_model_dir(SEEDLING), folder, copy_function=shutil.copyfile)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + OPENING_TAG)
    made = tmp_path / "made"
    made.mkdir()
    facts = {"path": str(folder), "revision": None, "context": 256}
    (made / "model.json").write_text(json.dumps(facts))
    found = artifact(made, "model", {})
    assert prefilled_part(found, "What is 2 + 2?", MODEL, PROMPT) == OPENING_TAG
