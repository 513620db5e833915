"""The SFT stage on a tiny random model: loss, ending, guard, resuming."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ratchet.config.run import LoraConfig, ModelConfig, PromptFormat, WandbConfig
from ratchet.errors import UserError
from ratchet.store.schemas import read_table
from ratchet.verifier import Style, Verdict, verify
from tasks.stages import warmstart_sft
from tasks.training import dev_check
from tasks.training.seeds import training_order
from tasks.warmstart.data import build_examples
from tasks.warmstart.nan_guard import EXAMPLE
from tests.conftest import REPO
from tests.support.tiny_warmstart import SFT, Emit, questions, run_sft, stage_context, with_dev

RIGHT = "<start_working_out>\n1\n<end_working_out>\n<SOLUTION>4</SOLUTION>"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def mean_answer_loss(checkpoint: Path, question_ids: list[str]) -> float:
    """Mean −log p over the answer tokens of these questions, one example at a time."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    rows = [row for row in questions() if row["question_id"] in question_ids]
    found = build_examples(
        rows, tokenizer, PromptFormat.TAGS_SHORT, enable_thinking=False, max_length=999, limit=None
    )
    losses: list[float] = []
    for example in found.examples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([example.input_ids])).logits[0]
        log_probs = logits.log_softmax(-1)
        start = len(example.prompt_ids)
        losses += [
            -log_probs[start + i - 1, token].item() for i, token in enumerate(example.answer_ids)
        ]
    return sum(losses) / len(losses)


def test_loss_progress_and_ending(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    ctx = stage_context(tmp_path, emit=events.append)
    result = run_sft(ctx)

    rows = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]  # 8 questions, twice, 4 at a time
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5

    # The trainer's first loss, over two padded micro-batches, is the mean over the answer tokens.
    expected = mean_answer_loss(tmp_path / "model" / "checkpoint", batch_of_step(0))
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-5)

    progress = [event for event in events if event["event"] == "progress"]
    assert [(event["done"], event["total"]) for event in progress] == [(n, 4) for n in (1, 2, 3, 4)]
    assert progress[-1]["note"].startswith(f"loss {rows[-1]['loss']:.4f}")

    assert result.summary["num_examples"] == 8
    assert result.summary["reload_max_difference"] < 1e-5
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {
        file.name for file in (ctx.out_dir / "checkpoint").iterdir()
    }
    before = load_file(tmp_path / "model" / "checkpoint" / "model.safetensors")
    assert all(not torch.equal(before[name], after) for name, after in weights(ctx.out_dir).items())


def batch_of_step(step: int) -> list[str]:
    """Question ids of an optimizer step: shuffled and laid out as the stage does it, shortest
    first (q8 and q9 have answers of two digits)."""
    names = [f"q{n}" for n in range(2, 10)]
    random.Random(0).shuffle(names)
    order = training_order(8, 16, 0)
    batch = [names[i] for i in order[4 * step : 4 * step + 4]]
    return sorted(batch, key=lambda name: name in ("q8", "q9"))


def test_lora_checkpoint_is_the_base_plus_the_adapter(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path)
    lora = LoraConfig(enabled=True, r=4, alpha=8)
    result = run_sft(ctx, SFT.model_copy(update={"lora": lora}))
    assert 0 < result.summary["reload_max_difference"] < 1e-4  # rounding of the merge
    name = "model.layers.1.mlp.down_proj"
    adapter = load_file(ctx.out_dir / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    base = load_file(tmp_path / "model" / "checkpoint" / "model.safetensors")[f"{name}.weight"]
    assert b.abs().max() > 0
    merged = weights(ctx.out_dir)[f"{name}.weight"]
    assert torch.allclose(merged, base + 2.0 * (b @ a), atol=1e-6)
    # every linear layer has one, the head (tied to the embeddings) has none
    assert len(adapter) == 2 * 7 * 2


def test_bfloat16_trains_float32_weights_and_saves_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[PreTrainedModel] = []
    original = warmstart_sft.load_model

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        loaded.append(original(*args, **kwargs))
        assert {p.dtype for p in loaded[0].parameters()} == {torch.float32}
        return loaded[0]

    monkeypatch.setattr(warmstart_sft, "load_model", load_model)
    ctx = stage_context(tmp_path)
    result = run_sft(ctx, model=ModelConfig(dtype="bfloat16"))
    assert {tensor.dtype for tensor in weights(ctx.out_dir).values()} == {torch.bfloat16}
    assert 0 < result.summary["reload_mean_difference"] < 0.05


def plant(monkeypatch: pytest.MonkeyPatch, backward: int) -> None:
    """One weight's gradient becomes NaN in the given backward pass."""
    original = warmstart_sft.load_model
    passes = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return gradient * float("nan") if passes == backward else gradient

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = original(*args, **kwargs)
        model.model.layers[0].mlp.down_proj.weight.register_hook(spoil)
        return model

    monkeypatch.setattr(warmstart_sft, "load_model", load_model)


def test_a_non_finite_gradient_stops_the_run_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, backward=4)  # second micro-batch of the second step
    ctx = stage_context(tmp_path)
    with pytest.raises(UserError) as caught:
        run_sft(ctx)
    folder = ctx.work_dir / "replay-step-2"
    batch = batch_of_step(1)
    assert str(caught.value) == (
        "gradient norm is nan at step 2 of sft (attention eager, float32); questions "
        f"{', '.join(batch)}. Batch and weights are in {folder}. "
        "Try a lower sft.learning_rate."
    )
    with safe_open(folder / "batch.safetensors", "pt") as replay:
        about = json.loads(replay.metadata()["ratchet"])
        tensors = {name: replay.get_tensor(name) for name in replay.keys()}  # noqa: SIM118
    assert about["question_ids"] == [batch[:2], batch[2:]]
    assert (about["step"], about["attention"], about["dtype"]) == (2, "eager", "float32")
    # The weights are those the batch met: its loss is what one step of training left.
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    names = ("input_ids", "attention_mask", "labels")
    losses = [model(**{n: tensors[f"{i}.{n}"] for n in names}).loss.item() for i in (0, 1)]
    assert all(0 < loss < 6 for loss in losses)
    assert tensors[f"0.{EXAMPLE}"].shape == (2,)
    told = subprocess.run(
        [sys.executable, "-m", "tasks.commands.replay", str(folder)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told[0] == "gradient norm not finite at step 2 of sft, attention eager, float32"
    rows = [line.split() for line in told if line.startswith(("sdpa ", "eager "))]
    assert [row[:2] for row in rows] == [
        [attention, dtype] for attention in ("sdpa", "eager") for dtype in ("bfloat16", "float32")
    ]
    for row in rows:  # what was planted is not in the batch
        assert float(row[2]) == pytest.approx(sum(losses) / 2, abs=0.02)
        assert 0 < float(row[3]) < 100
    assert told[-1].startswith("Finite everywhere")


def test_a_replay_names_what_is_not_finite(tmp_path: Path) -> None:
    from tasks.commands.replay import diagnosis, outcomes, read_replay

    ctx = stage_context(tmp_path)
    model = ctx.inputs["model"].folder / "checkpoint"
    folder = tmp_path / "replay-step-7"
    shutil.copytree(model, folder / "model")
    spoilt = load_file(folder / "model" / "model.safetensors")
    spoilt["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(spoilt, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(5, 11)[None]
    batch = {"0.input_ids": ids, "0.attention_mask": torch.ones_like(ids), "0.labels": ids.clone()}
    about = {"step": 7, "what": "loss", "method": "sft", "question_ids": [["q1"]]}
    header = {"ratchet": json.dumps(about)}
    save_file(batch, folder / "batch.safetensors", metadata=header)
    found = list(outcomes(read_replay(folder)))
    assert not any(one.ok for one in found)
    assert all(one.first_bad is not None for one in found)
    assert diagnosis(found).startswith("Finite nowhere")
    mixed = [replace(found[0], loss=1.0, gradient_norm=2.0), *found[1:]]
    assert diagnosis(mixed).startswith("Finite with sdpa in bfloat16; not with sdpa in float32,")
    with pytest.raises(UserError, match="holds no replay"):
        read_replay(tmp_path)
    save_file({"0.input_ids": ids}, folder / "batch.safetensors", metadata=header)
    with pytest.raises(UserError, match="lacks attention_mask: it can't be run again"):
        read_replay(folder)


def test_a_non_finite_loss_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = warmstart_sft.load_model

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = original(*args, **kwargs)
        with torch.no_grad():
            model.model.norm.weight[0] = float("inf")
        return model

    monkeypatch.setattr(warmstart_sft, "load_model", load_model)
    with pytest.raises(UserError, match="loss is nan at step 1 of sft"):
        run_sft(stage_context(tmp_path))


def test_offline_wandb_run_lies_in_the_runs_folder(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path)
    result = run_sft(ctx, wandb=WandbConfig(mode="offline"))
    assert result.wandb_run is not None
    place = Path(result.wandb_run)
    assert place.is_relative_to(tmp_path / "store" / "runs" / "test-run")
    assert list(place.glob("*.wandb"))


def test_killed_and_resumed_gives_the_same_weights_and_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.tiny_warmstart", str(tmp_path / "killed"), "3"]
    killed = subprocess.run(command, cwd=REPO, check=False)
    assert killed.returncode == -9
    resumed_from: list[str] = []
    keep: Emit = lambda event: resumed_from.append(event.get("message", ""))  # noqa: E731
    resumed = stage_context(tmp_path / "killed", with_dev(), emit=keep)
    run_sft(resumed)
    assert "continuing from checkpoint-2" in resumed_from
    whole = stage_context(tmp_path / "whole", with_dev())
    run_sft(whole)
    for name, tensor in weights(whole.out_dir).items():
        assert torch.equal(tensor, weights(resumed.out_dir)[name]), name
    tables = [read_table(ctx.out_dir / "metrics.parquet", "metrics") for ctx in (resumed, whole)]
    assert tables[0].equals(tables[1])
    assert tables[0].column("dev_strict").to_pylist() == [0.0] * 4


def judged(monkeypatch: pytest.MonkeyPatch, strict: list[float]) -> None:
    """Check after check, the share of the five dev answers that the judge finds right."""
    checks = iter(strict)

    def judge(texts: list[str], golds: list[str], style: Style) -> list[Verdict]:
        assert len(texts) == len(golds) == 5
        right, wrong = (verify(text, "4", style) for text in (RIGHT, "no"))
        num_right = round(next(checks) * 5)
        return [right] * num_right + [wrong] * (5 - num_right)

    monkeypatch.setattr(dev_check, "verify_batch", judge)


@pytest.mark.parametrize("lora", [False, True])
def test_training_ends_when_dev_answers_get_worse(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, [0.6, 0.2, 0.4])
    ctx = stage_context(tmp_path, with_dev(5))
    adapter = LoraConfig(enabled=lora, r=4, alpha=8)
    sft = SFT.model_copy(update={"patience": 2, "lora": adapter})
    result = run_sft(ctx, sft)
    rows = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert [row["dev_strict"] for row in rows] == [0.6, 0.2, 0.4]
    found = {name: result.summary[name] for name in ("best_step", "num_steps", "num_steps_planned")}
    assert found == {"best_step": 1, "num_steps": 3, "num_steps_planned": 4}
    assert "The policy of step 1 is the result: 60.0% strict" in result.markdown
    training = ctx.work_dir / "training"
    steps = {int(one.name.split("-")[1]) for one in training.glob("checkpoint-*")}
    assert steps == {1, 2, 3}
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    saved = load_file(ctx.out_dir / ("adapter" if lora else "checkpoint") / file)
    kept = {step: load_file(training / f"checkpoint-{step}" / file) for step in steps}
    assert all(torch.equal(saved[name], kept[1][name]) for name in saved)
    assert not all(torch.equal(saved[name], kept[3][name]) for name in saved)
    # Killed after the last step, the stage asks no question again and comes to the same.
    again = stage_context(tmp_path, with_dev(5))
    repeated = run_sft(again, sft)
    assert repeated.summary["dev_strict_best"] == 0.6
    merged = load_file(again.out_dir / "checkpoint" / "model.safetensors")
    assert result.summary["reload_max_difference"] == repeated.summary["reload_max_difference"]
    assert read_table(again.out_dir / "metrics.parquet", "metrics").to_pylist() == rows
    assert merged.keys() >= (set() if lora else saved.keys())
    if not lora:
        assert all(torch.equal(saved[name], merged[name]) for name in saved)


def test_without_dev_questions_the_last_policy_is_the_result(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path, with_dev())
    result = run_sft(ctx, SFT.model_copy(update={"dev_questions": 0, "checkpoints": 2}))
    assert "best_step" not in result.summary
    assert "The last policy is the result" in result.markdown
    training = ctx.work_dir / "training"
    assert sorted(one.name for one in training.iterdir() if one.is_dir()) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
