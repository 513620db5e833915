"""Weights that reach a real vLLM engine: log-probabilities against transformers, version after
version, and what the trainer's own drift figure says in whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratchet.config.run import GuardConfig, LoraConfig
from ratchet.errors import UserError
from ratchet.store.schemas import read_table
from tests.support.tiny_grpo import SEEDLING, context, in_process, run_stage
from tests.support.tiny_model import tiny_model, tiny_tokenizer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine_environment")]

IDS = list(range(10, 70))


def seedling() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32)


def with_adapter(model: Any, seed: int, rank: int = 4) -> Any:
    """The model with a LoRA whose B is not zero, so that it changes what the model says."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    config = PeftLoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    found = get_peft_model(model, config)
    redraw(found, seed)
    return found


def redraw(model: Any, seed: int) -> None:
    """New random adapter weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def trainer_logprobs(model: Any) -> torch.Tensor:
    """Log-probabilities of `IDS` after the first, shape (59,)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def sampler_logprobs(llm: Any) -> torch.Tensor:
    """The same from the engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": IDS}], sampling_params=params, use_tqdm=False)
    return torch.tensor(
        [at[token].logprob for at, token in zip(answer.prompt_logprobs[1:], IDS[1:], strict=True)]
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine for adapters on the seedling."""
    from tasks.models.checkpoints import ModelLocation
    from tasks.sampling.engines.base import EngineSpec
    from tasks.sampling.engines.vllm_engine import close_engine
    from tasks.sync.engine import AdapterLLM, EngineSettings, engine_arguments, engine_process

    spec = EngineSpec(
        location=ModelLocation(str(SEEDLING), None),
        tokenizer=None,  # type: ignore[arg-type]
        stop_ids=(),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        gpu_memory_utilization=0.1,
    )
    settings = EngineSettings(spec, 0, 8, tmp_path_factory.mktemp("versions"))
    threads = torch.get_num_threads()
    with engine_process(seedling().config, spec):
        made = AdapterLLM(str(SEEDLING), max_model_len=128, **engine_arguments(settings))
    assert torch.get_num_threads() == threads
    yield made
    close_engine(made)


def test_every_version_reaches_the_engine_whole(llm: Any, tmp_path: Path) -> None:
    from tasks.sync.adapter import AdapterVersions

    model = with_adapter(seedling(), seed=0)
    versions = AdapterVersions(tmp_path / "versions")
    last = None
    for step in range(3):
        redraw(model, step)
        version = versions.save(model, step)
        llm.use(version)
        wanted, found = trainer_logprobs(model), sampler_logprobs(llm)
        assert (wanted - found).abs().max() < 1e-4
        assert (wanted - found).abs().mean() < 1e-5
        if last is not None:
            assert (wanted - last).abs().mean() > 0.05  # the versions do differ
        last = wanted
        assert llm.llm_engine.list_loras() == {step + 1}


def test_answer_of_another_version_is_refused(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.sync import engine
    from tasks.sync.adapter import AdapterVersions

    versions = AdapterVersions(tmp_path / "versions")
    model = with_adapter(seedling(), seed=0)
    old, new = versions.save(model, 4), versions.save(model, 5)
    llm.use(new)
    stale = engine._request(old)
    monkeypatch.setattr(engine, "_request", lambda version: stale)
    with pytest.raises(RuntimeError, match="sampled from version-000004, not from version-000005"):
        sampler_logprobs(llm)


def test_adapter_that_the_engine_cannot_hold_is_the_users_to_fix(llm: Any, tmp_path: Path) -> None:
    from tasks.sync.adapter import AdapterVersions

    model = with_adapter(seedling(), seed=0, rank=16)  # the engine was made for 8
    version = AdapterVersions(tmp_path / "versions").save(model, 6)
    with pytest.raises(UserError, match=r"rank 16 .* grpo\.sync = 'merged' or sampler\.engine"):
        llm.use(version)


def bare_merged(model: Any) -> Any:
    """The merged backend without an engine, whose transfer fails at the second tensor; its
    parameter iterator is real."""
    from accelerate import Accelerator

    from tasks.sync.generation import MergedGeneration

    class WithoutEngine(MergedGeneration):
        def _init_vllm(self) -> None:
            pass

        def _transfer(self) -> int:
            for count, _ in enumerate(self._iter_named_params()):
                assert count == 0, "the engine is full"
            return 0

    settings: Any = SimpleNamespace(spec=SimpleNamespace(dtype="float32"))
    return WithoutEngine(model, Accelerator(cpu=True), None, settings=settings)  # type: ignore[arg-type]


def test_merged_tensors_stay_merged_after_the_iterator_has_ended() -> None:
    model = with_adapter(tiny_model(tiny_tokenizer()), seed=1)
    base = {name: value.clone() for name, value in model.named_parameters()}
    handed_out = dict(bare_merged(model)._iter_named_params())
    prefix = "base_model.model."
    num_adapted = 0
    for name, tensor in handed_out.items():
        stem = prefix + name.removesuffix(".weight")
        key = f"{stem}.lora_B.default.weight"
        if key in base:
            a = base[f"{stem}.lora_A.default.weight"]
            wanted = base[f"{stem}.base_layer.weight"] + 2 * base[key] @ a
            num_adapted += 1
        else:
            wanted = base[prefix + name]
        torch.testing.assert_close(tensor, wanted, atol=1e-6, rtol=1e-6)
    assert num_adapted == 2 * 7
    for name, value in model.named_parameters():  # and the trainer's own weights are back
        torch.testing.assert_close(value, base[name], atol=1e-6, rtol=1e-6)


def test_a_transfer_that_fails_leaves_the_adapter_unmerged() -> None:
    model = with_adapter(tiny_model(tiny_tokenizer()), seed=1)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    before = layer.base_layer.weight.clone()
    with pytest.raises(AssertionError, match="the engine is full"):
        bare_merged(model).sync_weights()
    assert not layer.merged
    torch.testing.assert_close(layer.base_layer.weight, before, atol=1e-6, rtol=1e-6)


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(
        folder / "out" / "metrics.parquet", "metrics"
    ).to_pylist()
    return rows


def assert_one_policy(rows: list[dict[str, Any]]) -> None:
    """Trainer and sampler agree at every step, though the policy moves."""
    assert [row["policy_version"] for row in rows] == [row["step"] - 1 for row in rows]
    for row in rows:
        assert row["drift_mean"] < 1e-5, row["step"]
        assert row["dropped_share"] == 0
        assert row["effective_sample_share"] == pytest.approx(1, abs=1e-4)
        assert row["unmasked_ratio_mean"] == pytest.approx(1, abs=1e-3)


@pytest.fixture(scope="module")
def by_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole LoRA run with adapter sync."""
    folder = tmp_path_factory.mktemp("adapter")
    run_stage(context(folder, SEEDLING), engine="vllm")
    return folder


def test_adapter_sync_does_not_drift(by_adapter: Path) -> None:
    rows = metrics(by_adapter)
    assert_one_policy(rows)
    # every linear layer of three blocks: A and B of rank 4 in float32
    assert rows[0]["sync_bytes"] == sum(
        value.nbytes for value in _weights(by_adapter, "adapter/adapter_model").values()
    )
    left = [path.name for path in (by_adapter / "work" / "adapters" / "0").iterdir()]
    assert left == ["version-000003"]


def test_killed_vllm_run_continues_to_the_same_end(by_adapter: Path, tmp_path: Path) -> None:
    died = in_process(tmp_path, SEEDLING, "vllm", 4, kill_at=3)
    assert died.returncode == -9
    said: list[str] = []
    ctx = replace(
        context(tmp_path, SEEDLING), emit=lambda event: said.append(event.get("message", ""))
    )
    run_stage(ctx, engine="vllm")
    assert "continuing from checkpoint-2" in said
    one, two = (
        read_table(folder / "out" / "rollouts.parquet", "rollouts").to_pylist()
        for folder in (by_adapter, tmp_path)
    )
    assert one == two
    one, two = (_weights(folder, "checkpoint/model") for folder in (by_adapter, tmp_path))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_full_fine_tuning_reaches_every_weight_of_the_engine(tmp_path: Path) -> None:
    # Tied embeddings: the head is the tensor that a CPU engine is known to keep stale.
    run_stage(
        context(tmp_path, SEEDLING),
        engine="vllm",
        steps=3,
        learning_rate=1e-3,
        lora=LoraConfig(enabled=False),
    )
    rows = metrics(tmp_path)
    assert_one_policy(rows)
    before, after = _tensors(SEEDLING / "model.safetensors"), _weights(tmp_path, "checkpoint/model")
    assert rows[0]["sync_bytes"] == sum(value.nbytes for value in before.values())
    assert all((before[name] - after[name]).abs().max() > 1e-4 for name in before)


def test_merged_sync_of_an_adapter_leaves_no_trace_and_does_not_drift(tmp_path: Path) -> None:
    # The guard halts when a bit of the base has changed.
    every_step = GuardConfig(base_every=1)
    run_stage(context(tmp_path, SEEDLING), engine="vllm", steps=3, sync="merged", guard=every_step)
    assert_one_policy(metrics(tmp_path))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(path)
    return loaded


def _weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
    return _tensors(folder / "out" / f"{part}.safetensors")
