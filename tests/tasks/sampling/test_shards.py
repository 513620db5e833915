"""Shards: reuse, resuming, keys, and the three stages that sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import (
    EvaluateConfig,
    ModelConfig,
    PresampleConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
    WorkersConfig,
)
from ratchet.errors import UserError
from ratchet.models.check import SEEDLING, packaged_model_dir
from ratchet.questions.symbolic import draw
from ratchet.store.store import Artifact, Store
from ratchet.verifier import Status, verify
from tasks.runtime.context import StageContext, StageResult
from tasks.sampling.engines import Shaping, transformers_engine
from tasks.sampling.sample import sample_shards
from tasks.sampling.shards import SampleRequest, Shard, ShardStore, plan_shards
from tasks.stages import evaluate, presample
from tests.support.made_up import artifact, context, question

MODEL = ModelConfig(path=SEEDLING)
SAMPLER = SamplerConfig(engine="transformers", max_completion_tokens=48, max_num_seqs=64)
ALONE = WorkersConfig()
PROMPT = PromptConfig(format=PromptFormat.TAGS_SHORT)


def model_artifact(folder: Path, **fields: Any) -> Artifact:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"path": str(packaged_model_dir(SEEDLING)), "revision": None, "context": 256}
    (folder / "model.json").write_text(json.dumps(facts))
    return artifact(folder, "model", {}, **fields)


def rows(count: int, role: str = "train", seed: int = 3) -> list[dict[str, Any]]:
    return [
        question(
            f"{role}-{index}",
            question=item.question,
            gold=item.gold,
            role=role,
            source="symbolic" if index % 2 else "other",
            band=str(item.num_steps),
        )
        for index, item in enumerate(draw(count, seed, max_steps=3))
    ]


def stage_context(
    tmp_path: Path, name: str, questions: list[dict[str, Any]], seed: int = 0
) -> StageContext:
    """A context of its own folder; all share one store."""
    folder = tmp_path / name
    folder.mkdir()
    inputs = {
        "model": model_artifact(folder / "model"),
        "questions": artifact(
            folder / "questions",
            "questions",
            {"questions": questions},
            summary={"prefilled": ""},
        ),
    }
    return replace(context(folder, inputs, seed), store=Store(tmp_path / "store"))


def request(questions: list[dict[str, Any]], **fields: Any) -> SampleRequest:
    values = {
        "questions": questions,
        "prompt_format": PromptFormat.TAGS_SHORT,
        "num_samples": 4,
        "block": 2,
        "temperature": 1.0,
        "shard_questions": 3,
    }
    return SampleRequest(**(values | fields))


def keys(ctx: StageContext, wanted: SampleRequest, **settings: Any) -> list[str]:
    """Keys of a request's shards; prompts are made up from the questions' texts."""
    prompts = [tuple(row["question"].encode()) for row in wanted.questions]
    shards = ShardStore(ctx, MODEL, SAMPLER.model_copy(update=settings))
    return [shards.key_of(shard) for shard in plan_shards(wanted, prompts)]


def test_shards_are_chunks_times_blocks() -> None:
    questions = rows(7)
    shards = plan_shards(request(questions), [(index,) for index in range(7)])
    assert [(len(shard.prompts), shard.first_sample) for shard in shards] == [
        (3, 0), (3, 2), (3, 0), (3, 2), (1, 0), (1, 2),
    ]  # fmt: skip
    assert shards[4].question_ids == ("train-6",)
    assert shards[4].prompts == ((6,),)


def test_more_samples_or_questions_keep_the_keys_of_what_exists(tmp_path: Path) -> None:
    questions = rows(9)
    ctx = stage_context(tmp_path, "a", questions)
    first = set(keys(ctx, request(questions[:6])))
    assert len(first) == 4
    assert first < set(keys(ctx, request(questions[:6], num_samples=8)))
    assert first < set(keys(ctx, request(questions)))
    apart = request(questions[:6], num_samples=2, first_sample=4)
    assert not first & set(keys(ctx, apart)), "draws from another index on are other draws"
    assert set(keys(ctx, apart)) < set(keys(ctx, request(questions[:6], num_samples=8)))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7},
        {"prompt_format": PromptFormat.HASH_SHORT},
        {"block": 4},
        {"shaping": Shaping(top_p=0.9)},
        {"shaping": Shaping(top_k=20)},
        {"settings": {"max_completion_tokens": 47}},
        {"settings": {"engine": "vllm"}},
        {"settings": {"max_num_seqs": 63}},
    ],
)
def test_whatever_changes_tokens_changes_every_key(tmp_path: Path, change: dict[str, Any]) -> None:
    questions = rows(4)
    ctx = stage_context(tmp_path, "a", questions)
    settings = change.pop("settings", {})
    before = set(keys(ctx, request(questions)))
    assert not before & set(keys(ctx, request(questions, **change), **settings))


def test_keys_follow_model_seed_and_text_but_greedy_ones_no_seed(tmp_path: Path) -> None:
    questions = rows(3)
    ctx = stage_context(tmp_path, "a", questions)
    other_seed = replace(ctx, seed=1)
    model = model_artifact(tmp_path / "m", key="another")
    other_model = replace(ctx, inputs=dict(ctx.inputs) | {"model": model})
    sampled, greedy = request(questions), request(questions, temperature=0.0)
    assert keys(ctx, sampled) != keys(other_seed, sampled)
    assert keys(ctx, greedy) == keys(other_seed, greedy)
    assert keys(ctx, greedy) != keys(other_model, greedy)
    changed = [questions[0] | {"question": "How many?"}, *questions[1:]]
    assert keys(ctx, sampled)[0] != keys(ctx, request(changed))[0]
    assert keys(ctx, sampled) == keys(ctx, request(questions), gpu_memory_utilization=0.5)


def test_variants_are_sampled_with_the_same_draws(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path, "a", rows(1))
    model = model_artifact(tmp_path / "m", key="another")
    other = replace(ctx, inputs=dict(ctx.inputs) | {"model": model})
    shard = Shard(("q",), ((1, 2),), PromptFormat.TAGS_SHORT, 0, 2, 1.0)
    later = replace(shard, first_sample=2)
    one, two = (ShardStore(c, MODEL, SAMPLER) for c in (ctx, other))
    assert one.call_seed(shard) == two.call_seed(shard)
    assert one.call_seed(shard) != one.call_seed(later)


@pytest.mark.slow
def test_no_engine_is_opened_when_everything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = rows(3)
    wanted = [request(questions), request(questions, temperature=0.0, num_samples=1, block=1)]
    made = sample_shards(
        stage_context(tmp_path, "a", questions),
        wanted,
        model_config=MODEL,
        sampler=SAMPLER,
        workers=ALONE,
    )

    def refuse(*args: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(transformers_engine, "load_sampler", refuse)
    again = sample_shards(
        stage_context(tmp_path, "b", questions),
        wanted,
        model_config=MODEL,
        sampler=SAMPLER,
        workers=ALONE,
    )
    assert [found.table for found in again] == [found.table for found in made]
    assert [found.num_reused for found in again] == [2, 1]
    assert [found.new_tokens for found in again] == [0, 0]


@pytest.mark.slow
def test_a_damaged_shard_is_made_again_and_comes_out_the_same(tmp_path: Path) -> None:
    questions = rows(3)
    wanted = [request(questions)]
    ctx = stage_context(tmp_path, "a", questions)
    (made,) = sample_shards(ctx, wanted, model_config=MODEL, sampler=SAMPLER, workers=ALONE)
    shard = next(found for found in ctx.store.artifacts() if found.manifest.stage == "samples")
    (shard.folder / "completions.parquet").write_bytes(b"rubbish")
    said: list[str] = []
    again_ctx = replace(
        stage_context(tmp_path, "b", questions), emit=lambda event: said.append(str(event))
    )
    (again,) = sample_shards(again_ctx, wanted, model_config=MODEL, sampler=SAMPLER, workers=ALONE)
    assert again.num_reused == 1
    assert again.table == made.table
    assert any("completions.parquet has 7 bytes, not" in line for line in said)


@pytest.mark.slow
def test_shards_say_what_they_are(tmp_path: Path) -> None:
    questions = rows(2)
    ctx = stage_context(tmp_path, "a", questions, seed=5)
    events: list[dict[str, Any]] = []
    ctx = replace(ctx, emit=events.append)
    (found,) = sample_shards(
        ctx, [request(questions)], model_config=MODEL, sampler=SAMPLER, workers=ALONE
    )
    manifests = [made.manifest for made in ctx.store.artifacts()]
    assert [manifest.stage for manifest in manifests] == ["samples", "samples"]
    for manifest in manifests:
        assert manifest.seed == 5
        assert manifest.parents["model"].key == ctx.inputs["model"].manifest.key
        assert manifest.rows == {"completions": 4}
        assert manifest.device_seconds > 0
        assert "torch" in manifest.packages
    assert sum(manifest.sampled_tokens for manifest in manifests) == found.new_tokens
    assert found.new_tokens == sum(found.table.column("num_tokens").to_pylist())
    progress = [event for event in events if event["event"] == "progress"]
    assert (progress[-1]["done"], progress[-1]["total"]) == (8, 8)
    assert progress[-1]["note"].endswith("tok/s, 0 s left")


def run_evaluate(ctx: StageContext, samples: int, band_samples: int = 0) -> StageResult:
    return evaluate.run(
        ctx,
        model=MODEL,
        prompt=PROMPT,
        sampler=SAMPLER,
        workers=ALONE,
        evaluate=EvaluateConfig(samples=samples, band_samples=band_samples),
    )


@pytest.mark.slow
def test_evaluate_judges_every_answer_of_its_variant(tmp_path: Path) -> None:
    questions = rows(8, "test") + rows(4, "train", seed=9)
    ctx = replace(stage_context(tmp_path, "a", questions), node="evaluate.rl")
    result = run_evaluate(ctx, samples=2, band_samples=2)
    found = artifact(ctx.out_dir, "evaluate", {}).table("eval").to_pylist()
    assert len(found) == 8 * 5
    assert {row["variant"] for row in found} == {"rl"}
    assert [(r["decoding"], r["sample_index"]) for r in found if r["question_id"] == "test-1"] == [
        ("greedy", 0), ("sampled", 0), ("sampled", 1), ("banding", 2), ("banding", 3),
    ]  # fmt: skip
    drawn = {
        decoding: [row["text"] for row in found if row["decoding"] == decoding]
        for decoding in ("sampled", "banding")
    }
    assert drawn["sampled"] != drawn["banding"], "draws of their own"
    golds = {row["question_id"]: row["gold"] for row in questions}
    for row in found:
        verdict = verify(row["text"], golds[row["question_id"]], "tags")
        assert (row["strict"], row["lenient"]) == (verdict.strict, verdict.lenient)
        assert row["status"] == verdict.status
    figures = result.summary["benchmarks"]
    assert set(figures) == {"symbolic", "other"}
    for name, by_decoding in figures.items():
        assert set(by_decoding) == {"greedy", "sampled"}
        greedy = [r for r in found if r["benchmark"] == name and r["decoding"] == "greedy"]
        right = sum(r["strict"] for r in greedy)
        assert by_decoding["greedy"]["strict"] == right / 4
        assert by_decoding["greedy"]["strict_low"] <= right / 4
        assert by_decoding["greedy"]["strict_high"] >= right / 4
        assert "strict_low" not in by_decoding["sampled"]
        assert set(by_decoding["sampled"]["status_rates"]) == {status.value for status in Status}
        assert sum(by_decoding["sampled"]["status_rates"].values()) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_role_without_questions_is_a_clear_error(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path, "a", rows(2, "dev"))
    with pytest.raises(UserError, match=r"widen questions\.test"):
        run_evaluate(ctx, samples=0)
    with pytest.raises(UserError, match=r"widen questions\.train"):
        presample.run(
            ctx,
            model=MODEL,
            prompt=PROMPT,
            sampler=SAMPLER,
            workers=ALONE,
            presample=PresampleConfig(),
        )


@pytest.mark.slow
def test_a_prompt_beyond_the_context_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    long = [question("q", question="What is 2 + 2? " * 60)]
    ctx = stage_context(tmp_path, "a", long)
    with pytest.raises(UserError, match=r"longest prompt and .* need \d+ tokens, the context"):
        sample_shards(ctx, [request(long)], model_config=MODEL, sampler=SAMPLER, workers=ALONE)
