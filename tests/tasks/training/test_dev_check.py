"""The dev check of GRPO: held-out questions at every checkpoint, and the best policy as result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ratchet.config.run import LoraConfig
from ratchet.store.schemas import read_table
from ratchet.verifier import Style, verify
from tasks.training import dev_check
from tasks.training.dev_check import best_step
from tasks.training.resume import MARKER, CheckpointKeeper
from tests.support.made_up import artifact, question
from tests.support.tiny_grpo import SEEDLING, context, run_stage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine_environment")]


def with_dev(folder: Path, count: int = 5) -> Any:
    """A tiny context whose questions include held-out ones, one of them longer than all others."""
    ctx = context(folder, SEEDLING)
    rows = ctx.inputs["questions"].table("questions").to_pylist()
    for index in range(count):
        text = f"What is {index} + 3?" + " Tell it." * (10 if index == 0 else 0)
        rows.append(question(f"d{index}", question=text, gold=str(index + 3), role="dev"))
    questions = artifact(folder / "with-dev", "questions", {"questions": rows})
    return replace(ctx, inputs={**ctx.inputs, "questions": questions})


def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge who finds everything right at the first checkpoint and nothing later."""
    calls: list[int] = []

    def judge(texts: list[str], golds: list[str], style: Style) -> Any:
        calls.append(len(texts))
        assert len(texts) == len(golds) == 5
        text = "<start_working_out>\n1\n<end_working_out>\n<SOLUTION>4</SOLUTION>"
        verdict = verify(text if len(calls) == 1 else "no", "4", style)
        return [verdict] * len(texts)

    monkeypatch.setattr(dev_check, "verify_batch", judge)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("lora", [True, False])
def test_the_best_policy_is_the_result(
    engine: str, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    falling(monkeypatch)
    ctx = with_dev(tmp_path)
    settings = {"learning_rate": 1e-2 if lora else 1e-3, "keep_checkpoints": 1}
    result = run_stage(ctx, engine=engine, lora=LoraConfig(enabled=lora, r=4), **settings)
    rows = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert [row.get("dev_strict") for row in rows] == [None, 1.0, None, 0.0]
    assert (result.summary["best_step"], result.summary["dev_strict_last"]) == (2, 0.0)
    assert "The policy of step 2 is the result: 100.0% strict" in result.markdown
    kept = ctx.work_dir / "training"
    assert sorted(one.name for one in kept.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    if lora:
        assert same(ctx.out_dir / "adapter" / "adapter_model", kept / "checkpoint-2/adapter_model")
        assert not same(
            ctx.out_dir / "adapter" / "adapter_model", kept / "checkpoint-4/adapter_model"
        )
    else:
        assert same(ctx.out_dir / "checkpoint/model", kept / "checkpoint-2/model")
        assert not same(ctx.out_dir / "checkpoint/model", kept / "checkpoint-4/model")


def same(one: Path, other: Path) -> bool:
    """Whether two safetensors files hold the same tensors."""
    a, b = (load_file(f"{path}.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_engines_give_the_same_dev_answers(tmp_path: Path) -> None:
    """Greedy answers of the same start by both samplers, judged by the real verifier."""
    pytest.importorskip("vllm")
    found = []
    for engine in ("transformers", "vllm"):
        ctx = with_dev(tmp_path / engine)
        run_stage(ctx, engine=engine, steps=1, learning_rate=1e-9, max_completion_tokens=24)
        (row,) = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
        found.append((row["dev_strict"], row["dev_lenient"]))
    assert found[0] == found[1]


def test_without_dev_questions_the_last_policy_is_the_result(tmp_path: Path) -> None:
    result = run_stage(with_dev(tmp_path), dev_questions=0)
    assert "best_step" not in result.summary
    assert "The last policy is the result" in result.markdown


def test_of_equal_steps_the_later_one_is_best() -> None:
    rows = [
        {"step": 1},
        {"step": 2, "dev_strict": 0.5},
        {"step": 4, "dev_strict": 0.6},
        {"step": 6, "dev_strict": 0.6},
    ]
    assert best_step(rows) == 6
    assert best_step(rows[:3]) == 4
    assert best_step(rows[:1]) is None


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    from types import SimpleNamespace

    keeper = CheckpointKeeper(1)
    history = [{"step": 2, "dev_strict": 0.5}, {"step": 4, "dev_strict": 0.4}]
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = SimpleNamespace(global_step=step, log_history=history)
        keeper.on_save(SimpleNamespace(output_dir=str(tmp_path)), state, None)
        assert (folder / MARKER).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]
