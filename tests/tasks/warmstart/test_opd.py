"""The OPD stage on tiny random models: loss, vocabulary, refusal, guard, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ratchet.config.run import LoraConfig, OpdConfig
from ratchet.diagnostics.drift import DriftError
from ratchet.errors import UserError
from ratchet.store.schemas import read_table
from ratchet.verifier import Style
from tasks.commands.replay import outcomes, read_replay
from tasks.models.checkpoints import ModelLocation
from tasks.runtime.context import StageContext
from tasks.sampling.engines.base import EngineSpec
from tasks.stages import warmstart_opd
from tasks.training.dev_check import EvalSet, greedy_answers
from tests.support.tiny_model import END, tiny_model, tiny_tokenizer
from tests.support.tiny_warmstart import (
    OPD,
    SAMPLER,
    run_opd,
    stage_context,
    tiny_model_files,
    with_dev,
)


def with_teacher(folder: Path, vocab_size: int | None = None, **fields: Any) -> OpdConfig:
    """The tests' OPD section with a random teacher made in `folder`."""
    teacher = tiny_model_files(folder / "teacher", seed=1, vocab_size=vocab_size)
    return OPD.model_copy(update={"teacher": str(teacher)} | fields)


@pytest.mark.parametrize("vocab_size", [None, 280])
def test_a_random_teacher_is_approached(tmp_path: Path, vocab_size: int | None) -> None:
    ctx = stage_context(tmp_path)
    result = run_opd(ctx, with_teacher(tmp_path, vocab_size))
    rows = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert result.summary["reload_max_difference"] < 1e-5
    assert result.summary["teacher_num_questions"] == 8
    assert result.sampled_tokens == sum(round(4 * row["completions/mean_length"]) for row in rows)
    saved = load_file(ctx.out_dir / "checkpoint" / "model.safetensors")
    assert saved["model.embed_tokens.weight"].shape[0] == len(tiny_tokenizer())


def test_a_student_that_is_its_teacher_has_no_loss(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path)
    same = str(tmp_path / "model" / "checkpoint")
    run_opd(ctx, OPD.model_copy(update={"teacher": same, "steps": 1}))
    (row,) = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert abs(row["loss"]) < 1e-6


def test_lora_distils_too(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path)
    result = run_opd(ctx, with_teacher(tmp_path, lora=LoraConfig(enabled=True, r=4, alpha=8)))
    assert 0 < result.summary["reload_max_difference"] < 1e-4
    assert (ctx.out_dir / "adapter" / "adapter_model.safetensors").exists()


def test_another_tokenizer_is_refused_before_training(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(("<new>",))
    tiny_model(tokenizer).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    ctx = stage_context(tmp_path)
    with pytest.raises(UserError, match="has another tokenizer than the student: id 261 is unused"):
        run_opd(ctx, OPD.model_copy(update={"teacher": str(tmp_path / "teacher")}))
    assert not (ctx.work_dir / "training").exists()


def test_a_non_finite_gradient_names_the_questions_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = warmstart_opd.load_model

    def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = original(*args, **kwargs)
        model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
        return model

    monkeypatch.setattr(warmstart_opd, "load_model", load_model)
    ctx = stage_context(tmp_path)
    with pytest.raises(UserError, match=r"gradient norm is (nan|inf) at step 1 of opd") as caught:
        run_opd(ctx, with_teacher(tmp_path))
    named = str(caught.value).split("questions ")[1].split(". Batch")[0].split(", ")
    assert len(named) == 4
    with safe_open(ctx.work_dir / "replay-step-1" / "batch.safetensors", "pt") as replay:
        prompts = [replay.get_tensor(f"{i}.prompt_ids") for i in (0, 1)]
        masks = [replay.get_tensor(f"{i}.prompt_mask") for i in (0, 1)]
    tokenizer = tiny_tokenizer()
    asked = [
        tokenizer.decode(row[mask.bool()])
        for batch, keep in zip(prompts, masks, strict=True)
        for row, mask in zip(batch, keep, strict=True)
    ]
    # Completions are shuffled within a batch; every prompt still stands beside its question.
    for name, text in zip(named, asked, strict=True):
        assert f"What is {name.removeprefix('q')} + 2?" in text
    # Run again alone, the batch has the loss that it has in training, and no bad gradient.
    monkeypatch.undo()
    found = list(outcomes(read_replay(ctx.work_dir / "replay-step-1")))
    assert all(one.ok for one in found)
    clean = stage_context(tmp_path / "clean")
    run_opd(clean, with_teacher(tmp_path, steps=1))
    (row,) = read_table(clean.out_dir / "metrics.parquet", "metrics").to_pylist()
    by_setting = {(one.attention, one.dtype): one for one in found}
    assert by_setting["eager", "float32"].loss == pytest.approx(row["loss"], rel=1e-4)
    assert by_setting["eager", "float32"].gradient_norm == pytest.approx(row["grad_norm"], rel=1e-3)


def test_greedy_answers_stop_at_the_stop_token() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=3)
    with torch.no_grad():
        ids = tokenizer.encode("ab", return_tensors="pt")
        greedy = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    tokens = greedy[0, ids.shape[1] :].tolist()
    stop = tokens[3]
    expected = tokenizer.decode(tokens[: tokens.index(stop)], skip_special_tokens=True)
    prompts = [tokenizer.encode("ab"), tokenizer.encode("a longer one, so that this is padded")]
    spec = EngineSpec(
        location=ModelLocation("nowhere", None),
        tokenizer=tokenizer,
        stop_ids=(stop, tokenizer.convert_tokens_to_ids(END)),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        gpu_memory_utilization=0.0,
    )
    found = greedy_answers(model, EvalSet(prompts, ["1", "2"], Style.TAGS, 6, ""), spec)
    assert found[0] == expected


VLLM = SAMPLER.model_copy(update={"engine": "vllm"})


def for_vllm(folder: Path, **fields: Any) -> StageContext:
    """The tiny stage with dev questions and a student that vLLM can sample on a CPU."""
    if not (folder / "model").exists():
        tiny_model_files(folder / "model", head_dim=32)
    return stage_context(folder, with_dev(), **fields)


@pytest.mark.slow
@pytest.mark.usefixtures("engine_environment")
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_interrupted_and_resumed_gives_the_same_weights_and_table(
    engine: Literal["transformers", "vllm"], tmp_path: Path
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    opd = with_teacher(tmp_path, lora=LoraConfig(enabled=engine == "vllm", r=4, alpha=8))
    sampler = SAMPLER.model_copy(update={"engine": engine})

    def stop(event: dict[str, Any]) -> None:
        if event.get("done") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_opd(for_vllm(tmp_path / "stopped", emit=stop), opd, sampler=sampler)
    said: list[str] = []
    resumed = for_vllm(
        tmp_path / "stopped", emit=lambda event: said.append(event.get("message", ""))
    )
    whole = for_vllm(tmp_path / "whole")
    for ctx in (resumed, whole):
        result = run_opd(ctx, opd, sampler=sampler)
        assert result.summary["engine"] == engine
        if engine == "vllm":
            assert 0 < result.summary["drift_mean"] <= result.summary["drift_max"] < 1e-4
            assert "Drift between vLLM and the student" in result.markdown
        else:
            assert "drift_mean" not in result.summary
    assert "continuing from checkpoint-2" in said
    one, two = (
        load_file(ctx.out_dir / "checkpoint" / "model.safetensors") for ctx in (resumed, whole)
    )
    for name in one:
        assert torch.equal(one[name], two[name]), name
    tables = [read_table(ctx.out_dir / "metrics.parquet", "metrics") for ctx in (resumed, whole)]
    assert tables[0].equals(tables[1])
    assert tables[0].column("dev_strict").to_pylist() == [0.0] * 4
    losses = tables[1].column("loss").to_pylist()
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("engine_environment")
def test_stale_weights_in_vllm_stop_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from tasks.sync.generation import MergedGeneration

    transfer = MergedGeneration._transfer

    def lost(self: MergedGeneration) -> int:
        return 0 if self.next_version == 2 else transfer(self)

    monkeypatch.setattr(MergedGeneration, "_transfer", lost)
    ctx = for_vllm(tmp_path)
    with pytest.raises(DriftError, match="step 3 of OPD: vLLM and the student differ"):
        run_opd(ctx, with_teacher(tmp_path), sampler=VLLM)


def test_an_adapter_that_vllm_cannot_sample_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    opd = OPD.model_copy(update={"teacher": "none", "lora": LoraConfig(enabled=True, r=4096)})
    with pytest.raises(UserError, match=r"opd\.lora\.r = 4096 is more than vLLM can sample"):
        run_opd(stage_context(tmp_path), opd, sampler=VLLM)
