"""Server mode without a server: how one is started, what is refused before that, and merged weights
through TRL's sender, vLLM's packer and its receiver in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratchet.config.run import GrpoConfig, LoraConfig, SamplerConfig
from ratchet.errors import UserError
from tests.support.tiny_grpo import SEEDLING
from tests.tasks.sync.test_sync import seedling
from tests.tasks.sync.test_upstream_packing import adapted_model, classify, tiny_qwen2

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


def server_settings(folder: Path) -> Any:
    """A server on the seedling for adapters of rank 8."""
    from tasks.models.checkpoints import ModelLocation
    from tasks.sampling.engines.base import EngineSpec
    from tasks.sync.server import ServerSettings

    spec = EngineSpec(
        location=ModelLocation(str(SEEDLING), None),
        tokenizer=None,  # type: ignore[arg-type]
        stop_ids=(),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
    )
    return ServerSettings(
        spec=spec,
        seed=7,
        lora_rank=8,
        folder=folder / "adapters",
        device=None,
        log_file=folder / "server.log",
        log=lambda message: None,
    )


def test_a_server_that_ends_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.sync import server

    script = "print('no memory left on the device'); raise SystemExit(3)"
    monkeypatch.setattr(server, "server_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(RuntimeError, match=r"ended with status 3 before(?s:.*)no memory left on"):
        server.VllmServer(server_settings(tmp_path), seedling().config)


def test_the_server_gets_its_own_device_and_no_ranks(tmp_path: Path) -> None:
    from tasks.sync.server import server_command, server_environment

    settings = replace(server_settings(tmp_path), device="3")
    inherited = {"RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/root"}
    found = server_environment(settings, seedling().config, inherited)
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert "RANK" not in found
    assert found["HOME"] == "/root"
    assert inherited["RANK"] == "1"
    command = server_command(settings, 81)
    for name, value in (("dtype", "float32"), ("seed", "7"), ("max-lora-rank", "8")):
        assert command[command.index(f"--{name}") + 1] == value
    assert "--weight-transfer-config" not in command
    assert "--weight-transfer-config" in server_command(replace(settings, lora_rank=None), 81)


class Loop:
    """What TRL's client needs of a server in a merged sync, without one."""

    def __init__(self, backend: Any, dtype: str = "float32", success: bool = True) -> None:
        from tasks.sync.server_client import ServerClient
        from tests.support import stock_packing

        class Client(ServerClient, stock_packing.LoopbackClient):
            def __init__(self) -> None:
                stock_packing.LoopbackClient.__init__(self)
                self._info = {"model_config": {"dtype": f"torch.{dtype}"}}

            def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
                stock_packing.LoopbackClient._post(self, url, **kwargs)
                return {"success": success}

        self.client = backend.vllm_client = Client()
        self.without_cuda = stock_packing.without_cuda

    def sync(self, backend: Any) -> list[tuple[str, torch.Tensor]]:
        """One sync; what arrives."""
        from benchmarks.packing import BUFFER_BYTES

        with self.without_cuda():
            backend.sync_weights()
            found: list[tuple[str, torch.Tensor]] = self.client.received(BUFFER_BYTES)
            return found


def merged_backend(model: Any, dtype: str = "float32") -> Any:
    """The merged backend of server mode, without a server."""
    from accelerate import Accelerator

    from tasks.sync.server_generation import ServerMergedGeneration

    class WithoutServer(ServerMergedGeneration):
        def _init_vllm(self) -> None:
            pass

    settings: Any = SimpleNamespace(spec=SimpleNamespace(dtype=dtype))
    return WithoutServer(model, Accelerator(cpu=True), None, mode="server", settings=settings)  # type: ignore[arg-type]


def test_merged_weights_arrive_merged_through_the_packer() -> None:
    model = adapted_model(tiny_qwen2())
    backend = merged_backend(model)
    shipped = Loop(backend).sync(backend)
    merged, base = classify(model, shipped)
    assert (len(merged), len(base)) == (28, 0)
    assert backend.last_sync.num_bytes == sum(tensor.nbytes for _, tensor in shipped)


def test_master_weights_go_out_in_the_servers_number_format() -> None:
    model = adapted_model(tiny_qwen2())
    backend = merged_backend(model, "bfloat16")
    shipped = Loop(backend, "bfloat16").sync(backend)
    assert {tensor.dtype for _, tensor in shipped} == {torch.bfloat16}


def test_another_number_format_than_the_servers_is_refused() -> None:
    model = adapted_model(tiny_qwen2())
    backend = merged_backend(model, "float32")
    with pytest.raises(RuntimeError, match="would be sent in float32 to a server in bfloat16"):
        Loop(backend, "bfloat16").sync(backend)
    assert not model.base_model.model.model.layers[0].mlp.up_proj.merged


def test_a_prefix_cache_that_was_not_reset_is_refused() -> None:
    backend = merged_backend(adapted_model(tiny_qwen2()))
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        Loop(backend, success=False).sync(backend)


def test_merged_sync_in_server_mode_needs_a_gpu_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tasks.sync.server_generation import check_nccl_devices

    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"no CUDA device here; or set grpo\.sync"):
            check_nccl_devices("1", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"name it in grpo\.vllm_server_device"):
        check_nccl_devices(None, 1)
    with pytest.raises(UserError, match="the trainer uses 1"):
        check_nccl_devices("1", 2)
    check_nccl_devices("2", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    with pytest.raises(UserError, match="the trainer uses 5"):
        check_nccl_devices("5", 1)
    check_nccl_devices("6", 1)


def test_a_backend_that_cannot_be_is_refused_before_anything_is_loaded() -> None:
    from tasks.grpo.build import check_backend

    vllm = SamplerConfig(engine="vllm")
    server = GrpoConfig(vllm_mode="server")
    check_backend(server, vllm, "float32")
    with pytest.raises(UserError, match=r"sampler\.engine = 'vllm'"):
        check_backend(server, SamplerConfig(engine="transformers"), "float32")
    with pytest.raises(UserError, match=r"grpo\.lora\.r=1024 is more than vLLM can sample"):
        check_backend(GrpoConfig(lora=LoraConfig(r=1024)), vllm, "float32")
    if not torch.cuda.is_available():
        full = GrpoConfig(vllm_mode="server", lora=LoraConfig(enabled=False))
        with pytest.raises(UserError, match="no CUDA device here"):
            check_backend(full, vllm, "float32")


def test_a_continued_run_starts_its_server_with_another_seed(tmp_path: Path) -> None:
    from tasks.grpo.build import server_seed
    from tasks.training.resume import MARKER
    from tasks.training.seeds import step_seed

    assert server_seed(3, tmp_path) == step_seed(3, 0, 0)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / MARKER).touch()
    assert server_seed(3, tmp_path) == step_seed(3, 20, 0)
