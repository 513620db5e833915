"""Faults planted in a real run with vLLM: the guard halts at the first step that shows them, says
why, and leaves a checkpoint that training goes on from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drift_runs import qwen2_with_key_biases
from ratchet.config.run import GuardConfig, LoraConfig
from ratchet.store.schemas import read_table
from tests.support.tiny_grpo import SEEDLING, context, run_stage

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine_environment")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose distributions are broad."""
    return qwen2_with_key_biases(tmp_path_factory.mktemp("model") / "qwen2")


def halted(folder: Path, *, model: Path = SEEDLING, **settings: Any) -> str:
    """What a run that must be halted says."""
    from ratchet.diagnostics.drift import DriftError

    with pytest.raises(DriftError) as caught:
        run_stage(context(folder, model), engine="vllm", **settings)
    return str(caught.value)


def leak(monkeypatch: pytest.MonkeyPatch, *, top_k: int, **engine: Any) -> None:
    """Sampling parameters of a checkpoint's generation config that reach the sampler."""
    from tasks.grpo import build
    from tasks.sync import generation

    real_config, real_arguments = build.trl_config, generation.engine_arguments

    def config(*args: Any, **kwargs: Any) -> Any:
        found = real_config(*args, **kwargs)
        found.generation_kwargs["top_k"] = top_k
        return found

    monkeypatch.setattr(build, "trl_config", config)
    monkeypatch.setattr(
        generation, "engine_arguments", lambda settings: real_arguments(settings) | engine
    )


def test_a_sampler_that_stays_behind_is_caught_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.sync import adapter

    real, kept = adapter.save_adapter, tmp_path / "first"

    def stuck(model: Any, folder: Path) -> int:
        if kept.exists():
            shutil.copytree(kept, folder)
            return 1
        num_bytes = real(model, folder)
        shutil.copytree(folder, kept)
        return num_bytes

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "save_adapter", stuck)
        said = halted(tmp_path, save_every=100)
    assert said.startswith("halted at step 2, before its batch was trained on: drift ")
    assert "reading given tokens, differs from the trainer, who agrees with itself" in said
    assert "The policy before it is saved (checkpoint-1)" in said

    # Mended, the same run goes on from there, and every step is there once.
    heard: list[str] = []
    ctx = replace(
        context(tmp_path, SEEDLING), emit=lambda event: heard.append(event.get("message", ""))
    )
    result = run_stage(ctx, engine="vllm", save_every=100)
    assert "continuing from checkpoint-1" in heard
    rows = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["drift_mean"] for row in rows) < 1e-5
    assert result.summary["drift_warnings"] == 0


def test_dropout_in_the_adapter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.grpo import build
    from tasks.models.lora import lora_config

    real_config = build.trl_config

    def config(*args: Any, **kwargs: Any) -> Any:
        found = real_config(*args, **kwargs)
        found.disable_dropout = False  # else TRL takes it out of the adapter
        return found

    def with_dropout(lora: LoraConfig) -> Any:
        found = lora_config(lora)
        assert found is not None
        found.lora_dropout = 0.5
        return found

    monkeypatch.setattr(build, "trl_config", config)
    monkeypatch.setattr(build, "lora_config", with_dropout)
    said = halted(tmp_path)
    assert said.startswith("halted at step 2")  # at step 1 the adapter is zero
    assert "the trainer in train mode and in evaluation mode differ" in said.lower()
    assert "Set every dropout" in said


def test_top_k_shows_in_the_ratio_where_the_sampler_logs_what_it_drew_from(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak(monkeypatch, top_k=5)
    said = halted(tmp_path, model=model)
    assert said.startswith("halted at step 1, before its batch was trained on: drift ")
    assert "the mean importance ratio is 0." in said
    assert "Set top_p = 1, top_k = 0" in said
    assert "Nothing was trained yet" in said


def test_top_k_shows_in_the_surprise_where_the_sampler_logs_the_full_distribution(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak(monkeypatch, top_k=5, logprobs_mode="raw_logprobs")
    said = halted(tmp_path, model=model)
    assert said.startswith("halted at step 1, before its batch was trained on: log p of the ")
    assert "the tokens were not drawn from that distribution" in said


def test_a_base_that_is_written_to_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.sync.generation import AdapterGeneration

    transfer = AdapterGeneration._transfer

    def merging(self: AdapterGeneration) -> int:
        self.model.merge_adapter()
        self.model.unmerge_adapter()
        return transfer(self)

    monkeypatch.setattr(AdapterGeneration, "_transfer", merging)
    said = halted(tmp_path, guard=GuardConfig(base_every=2))
    assert said.startswith("halted at step 2")  # a merge of zeros changes nothing
    assert "of 35 frozen tensors have changed (base_model.model.model" in said
    assert "Something writes to weights that aren't trained" in said
