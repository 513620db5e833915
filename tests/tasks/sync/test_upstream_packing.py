"""The fault of TRL's server mode, reproduced with the pinned TRL and vLLM, and what predicts it.

When one of these tests fails after a version was raised, upstream has changed: see `FIXED`.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from benchmarks.packing import BUFFER_BYTES, num_unflushed, stale_layers, wire_tensors
from tests.conftest import REPO

pytestmark = pytest.mark.slow  # importing vLLM is

FIXED = (
    "TRL {trl} no longer ships base weights in server mode: the fault is fixed upstream. Say since "
    "which version in docs/drift.md and benchmarks/packing.py, check whether the clone in "
    "tasks/sync/generation.py is still needed, and turn this test round."
)
NUM_LAYERS = 4
NUM_ADAPTED = NUM_LAYERS * 7


def tiny_qwen2(**changes: Any) -> Qwen2Config:
    """Four layers of width 32 with biases."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return Qwen2Config(**(settings | changes))


def adapted_model(config: Qwen2Config) -> Any:
    """With a LoRA on every linear layer whose B is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(Qwen2ForCausalLM(config), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def classify(model: Any, shipped: list[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
    """Names of adapted layers that arrived merged, W + s·B·A worked out here, and as bare W."""
    merged, base = [], []
    parameters = dict(model.named_parameters())
    arrived = dict(shipped)
    for name in arrived:
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_B.default.weight" not in parameters:
            continue
        weight = parameters[f"{stem}.base_layer.weight"]
        b = parameters[f"{stem}.lora_B.default.weight"]
        a = parameters[f"{stem}.lora_A.default.weight"]
        if torch.allclose(arrived[name], weight + 8 / 4 * b @ a, atol=1e-6):
            merged.append(name)
        elif torch.allclose(arrived[name], weight, atol=1e-6):
            base.append(name)
    return merged, base


@pytest.fixture(scope="module")
def stock() -> Any:
    """The simulation, which needs vLLM."""
    pytest.importorskip("vllm")
    from tests.support import stock_packing

    return stock_packing


def test_stock_server_sync_ships_base_weights(stock: Any) -> None:
    model = adapted_model(tiny_qwen2())
    merged, base = classify(model, stock.ship(model))
    assert (len(merged), len(base)) == (0, NUM_ADAPTED), FIXED.format(trl=version("trl"))


def test_cloning_on_yield_cures_it(stock: Any) -> None:
    model = adapted_model(tiny_qwen2())
    merged, base = classify(model, stock.ship(model, clone=True))
    assert (len(merged), len(base)) == (NUM_ADAPTED, 0)


def python_blocks() -> list[str]:
    """The code that docs/drift.md gives to people without Ratchet."""
    text = (REPO / "docs" / "drift.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_cure_in_the_docs_cures_it(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    stock_method = VLLMGeneration._iter_named_params
    monkeypatch.setattr(VLLMGeneration, "_iter_named_params", stock_method)  # put back afterwards
    (cure,) = [block for block in python_blocks() if "clone" in block]
    exec(cure, {})
    model = adapted_model(tiny_qwen2())
    merged, base = classify(model, stock.ship(model))
    assert (len(merged), len(base)) == (NUM_ADAPTED, 0)


def test_our_merged_sync_cures_it(stock: Any) -> None:
    # The same sender and receiver, fed by our iterator.
    from tasks.sync.generation import MergedGeneration

    class WithoutEngine(MergedGeneration):
        def _init_vllm(self) -> None:
            pass

    model = adapted_model(tiny_qwen2())
    settings: Any = SimpleNamespace(spec=SimpleNamespace(dtype="float32"))
    ours = WithoutEngine(model, stock.Accelerator(cpu=True), None, settings=settings)  # type: ignore[arg-type]
    merged, base = classify(model, stock.ship_from(ours, 2**14))
    assert (len(merged), len(base)) == (NUM_ADAPTED, 0)


@pytest.mark.filterwarnings("ignore:Tensor '.*' has size")
@pytest.mark.parametrize("buffer_bytes", [2**12, 2**14, 40_000, 2**16, 2**17, 2**18])
@pytest.mark.parametrize("tied", [True, False])
def test_prediction_is_what_the_real_packer_does(stock: Any, buffer_bytes: int, tied: bool) -> None:
    config = tiny_qwen2(tie_word_embeddings=tied)
    model = adapted_model(config)
    merged, base = classify(model, stock.ship(model, buffer_bytes=buffer_bytes))
    tensors = wire_tensors(config, torch.float32)
    assert base == stale_layers(tensors, buffer_bytes)
    assert merged + base == [tensor.name for tensor in tensors if tensor.adapted]


@pytest.mark.parametrize(("share", "stale"), [(1.0, 28), (0.62, 17), (0.13, 4), (0.0, 0)])
def test_scaled_packing_leaves_the_wanted_share_stale(stock: Any, share: float, stale: int) -> None:
    config = tiny_qwen2()
    model = adapted_model(config)
    packing = stock.packing_for(config, share)
    backend = stock.BallastFirst(
        model, stock.Accelerator(cpu=True), None, ballast_bytes=packing.ballast_bytes
    )
    merged, base = classify(model, stock.ship_from(backend, packing.buffer_bytes))
    assert (len(merged), len(base)) == (NUM_ADAPTED - stale, stale)
    assert packing.stale_share == stale / NUM_ADAPTED


def test_unflushed_tensors_by_hand() -> None:
    assert num_unflushed([4, 4, 4], 100) == 3  # never full: all wait for the end
    assert num_unflushed([4, 4, 4], 8) == 0  # 12 > 8 at the last one
    assert num_unflushed([4, 4, 4, 4], 8) == 1
    assert num_unflushed([4, 4], 8) == 2  # 8 is not more than 8
    assert num_unflushed([20, 4, 4, 4], 8) == 0
    assert num_unflushed([], 8) == 0


QWEN25_05B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
QWEN3_06B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    ("config", "dtype", "stale", "adapted", "num_bytes"),
    [
        # 988 MB never fill the buffer, so everything waits for the end.
        (QWEN25_05B, torch.bfloat16, 168, 168, 2 * 494_032_768),
        # The embedding (545 MB) and nine blocks (60 MB each) fill it once; 15 blocks wait.
        (QWEN25_05B, torch.float32, 15 * 7, 168, 4 * 494_032_768),
        # The embedding (311 MB), 24 blocks (31 MB each) and a bit fill it once; in float32 the
        # embedding and 7 blocks do, and 17 more a second time, which is the same place.
        (QWEN3_06B, torch.bfloat16, 25, 196, 2 * 596_049_920),
        (QWEN3_06B, torch.float32, 25, 196, 4 * 596_049_920),
    ],
)
def test_stale_share_of_real_models(
    config: PretrainedConfig, dtype: torch.dtype, stale: int, adapted: int, num_bytes: int
) -> None:
    tensors = wire_tensors(config, dtype)
    assert sum(tensor.num_bytes for tensor in tensors) == num_bytes
    assert sum(tensor.adapted for tensor in tensors) == adapted
    assert len(stale_layers(tensors, BUFFER_BYTES)) == stale


def test_the_table_in_the_docs() -> None:
    text = (REPO / "docs" / "drift.md").read_text(encoding="utf-8")
    for name, config in (("Qwen2.5-0.5B", QWEN25_05B), ("Qwen3-0.6B", QWEN3_06B)):
        cells = []
        for dtype in (torch.bfloat16, torch.float32):
            tensors = wire_tensors(config, dtype)
            stale, adapted = len(stale_layers(tensors)), sum(one.adapted for one in tensors)
            cells.append(f"{stale} of {adapted} ({stale / adapted:.0%})")
        assert f"| {name} | {cells[0]} | {cells[1]} |" in text
