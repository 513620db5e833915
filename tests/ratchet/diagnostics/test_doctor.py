"""The doctor and the view of rollouts, on real tiny runs with faults planted in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import GuardConfig, LoraConfig, ModelConfig, PromptConfig, SamplerConfig
from ratchet.diagnostics.doctor import Diagnosis, Evidence, examine, reward_shares
from ratchet.rollouts.training_run import evidence_of
from ratchet.store.schemas import read_table
from ratchet.verifier import Style
from tests.support.tiny_grpo import context, run_stage
from tests.support.tiny_model import tiny_model, tiny_tokenizer

STEPS = 6


def config(**grpo: Any) -> dict[str, Any]:
    """Sections of a stage as JSON values, as `tiny_grpo` sets them."""
    return {
        "model": ModelConfig().model_dump(mode="json"),
        "prompt": PromptConfig(format="tags_short").model_dump(mode="json"),
        "sampler": SamplerConfig(max_completion_tokens=8).model_dump(mode="json"),
        "rewards": {
            "weights": {"tests.support.tiny_grpo:letters": 5.0, "lenient_correctness_check": 1.0}
        },
        "grpo": {"lora": {"r": 4, "alpha": 8}} | grpo,
        "guard": GuardConfig().model_dump(mode="json"),
    }


def read(folder: Path, settings: dict[str, Any], adapter: Any = None) -> Evidence:
    """The evidence of a run in `folder`."""
    metrics, rollouts = (
        read_table(folder / "out" / f"{name}.parquet", name).to_pylist()
        for name in ("metrics", "rollouts")
    )
    return evidence_of(settings, metrics, rollouts, adapter)


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evidence]:
    """A run with a tiny learning rate, clipped gradients, eight tokens per completion and a reward
    for letters alone."""
    folder = tmp_path_factory.mktemp("ill")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder / "model-files")
    tokenizer.save_pretrained(folder / "model-files")
    faults = {"learning_rate": 1e-7, "max_grad_norm": 1e-6}
    weights = config()["rewards"]["weights"]
    run_stage(context(folder, folder / "model-files"), steps=STEPS, weights=weights, **faults)
    adapter = json.loads((folder / "out" / "adapter" / "adapter_config.json").read_text())
    return folder, read(folder, config(**faults), adapter)


def found(evidence: Evidence) -> dict[Diagnosis, str]:
    return {finding.diagnosis: finding.seen for finding in examine(evidence)}


def changed(rows: Sequence[Any], **figures: Sequence[float] | float) -> list[dict[str, Any]]:
    """The rows with these figures, one value for all or one per row."""
    return [
        dict(row)
        | {
            name: value if isinstance(value, int | float) else value[index]
            for name, value in figures.items()
        }
        for index, row in enumerate(rows)
    ]


@pytest.mark.slow
def test_faults_planted_in_a_run_are_named_with_their_figures(ill: tuple[Path, Evidence]) -> None:
    _, evidence = ill
    seen = found(evidence)
    assert set(seen) == {
        Diagnosis.NEVER_RIGHT,
        Diagnosis.TRUNCATED,
        Diagnosis.UNREADABLE,
        Diagnosis.DOMINATED,
        Diagnosis.SMALL_RATE,
        Diagnosis.CLIPPED,
    }
    assert (
        "LoRA with a learning rate of 1e-07, and the reward hasn't moved"
        in (seen[Diagnosis.SMALL_RATE])
    )
    assert "clipped on 5 of the last 5 steps" in seen[Diagnosis.CLIPPED]
    assert "cut off at 8 tokens" in seen[Diagnosis.TRUNCATED]
    assert seen[Diagnosis.DOMINATED].endswith(
        "% of what tells completions of a group apart is 'tests.support.tiny_grpo:letters'"
    )


@pytest.mark.slow
def test_adapter_faults_are_read_from_its_configuration(ill: tuple[Path, Evidence]) -> None:
    _, evidence = ill
    assert evidence.adapter is not None
    few = dict(evidence.adapter) | {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05}
    seen = found(replace(evidence, adapter=few))
    assert "LoRA adapts only q_proj, v_proj" in seen[Diagnosis.FEW_MODULES]
    assert "dropout 0.05" in seen[Diagnosis.DROPOUT]


@pytest.mark.slow
def test_faults_that_show_in_the_figures_alone(ill: tuple[Path, Evidence]) -> None:
    _, evidence = ill
    drifting = changed(evidence.metrics, drift_mean=[1e-6, 1e-5, 1e-4, 1e-3, 2e-3, 4e-3])
    drifting = changed(drifting, dropped_share=0.3)
    seen = found(replace(evidence, metrics=drifting))
    assert "drift of up to 4.0e-03 nats per token (expected below 5.0e-05)" in seen[Diagnosis.DRIFT]
    healthy = changed(evidence.metrics, drift_mean=4e-7, dropped_share=0.0)
    assert Diagnosis.DRIFT not in found(replace(evidence, metrics=healthy))

    dead = replace(evidence, metrics=changed(evidence.metrics, live_share=0.1))
    assert "all wrong and 0 all right" in found(dead)[Diagnosis.NO_LIVE_GROUPS]
    solved = replace(dead, metrics=changed(dead.metrics, strict=0.97))
    assert Diagnosis.NO_LIVE_GROUPS not in found(solved)

    entropies = [2.0, 1.9, 1.8, 1.7, 0.9, 0.6, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05]
    narrow = changed([*evidence.metrics, *evidence.metrics], entropy=entropies, reward=1.5)
    seen = found(replace(evidence, metrics=narrow))
    assert "fell 1.850 → 0.050" in seen[Diagnosis.COLLAPSED]
    rising = changed(narrow, reward=[float(step) for step in range(12)])
    assert Diagnosis.COLLAPSED not in found(replace(evidence, metrics=rising))


@pytest.mark.slow
def test_answers_in_another_place_are_named(ill: tuple[Path, Evidence]) -> None:
    _, evidence = ill
    boxed = changed(evidence.rollouts)
    for row in boxed[: len(boxed) // 2]:
        row["completion"] = "so the answer is \\boxed{3}"
    metrics = changed(evidence.metrics, lenient=0.7, strict=0.2)
    seen = found(replace(evidence, rollouts=boxed, metrics=metrics))[Diagnosis.MISPLACED]
    assert seen.startswith("50% of the completions are right but not in the format")
    assert "50% in \\boxed{}" in seen
    for row in boxed[: len(boxed) // 2]:
        row["prompt"] += "<think>"  # what is boxed in a thought is no answer
    assert Diagnosis.MISPLACED not in found(replace(evidence, rollouts=boxed))


def test_shares_of_rewards_are_shares_of_variance_within_groups() -> None:
    rows = [
        {"step": 1, "question_id": "a", "reward_x": x, "reward_y": y}
        for x, y in ((0.0, 0.0), (1.0, 0.0))
    ]
    rows += [
        {"step": 1, "question_id": "b", "reward_x": 1.0, "reward_y": y} for y in (0.0, 1.0, None)
    ]
    evidence = evidence_of(config(), [], rows, None)
    # weighted: x varies by (0, 2) in a, y by (0, 1) in b: variances 2 and 0.5
    evidence = replace(evidence, weights={"x": 2.0, "y": 1.0})
    assert reward_shares(evidence) == {"x": pytest.approx(0.8), "y": pytest.approx(0.2)}
    assert reward_shares(replace(evidence, rollouts=rows[2:3])) == {}


def test_too_few_steps_say_nothing() -> None:
    assert examine(evidence_of(config(), [{"step": 1}], [], None)) == []
    assert evidence_of(config(), [], [], None).style is Style.TAGS


@pytest.mark.slow
def test_doctor_speaks_up_while_training(tmp_path: Path, ill: tuple[Path, Evidence]) -> None:
    folder, _ = ill
    heard: list[str] = []
    ctx = replace(
        context(tmp_path, folder / "model-files"),
        emit=lambda event: heard.append(event.get("message", "")),
    )
    run_stage(ctx, steps=10, learning_rate=1e-7, lora=LoraConfig(r=4, alpha=8))
    said = [line for line in heard if line.startswith("doctor, step 10: ")]
    assert any("learning rate too small: LoRA with a learning rate of 1e-07" in s for s in said)
    assert any("truncation: " in line for line in said)
