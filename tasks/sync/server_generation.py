"""TRL's generation backend with the sampler in a server of our own.

`served(...)` puts `ServerAdapterGeneration` or `ServerMergedGeneration` in the place of
`VLLMGeneration` while a trainer is made in server mode; what they share with a colocated engine is
in `tasks.sync.versioned`. The server belongs to the trainer's main process, which also talks to it.

Merged weights travel by NCCL (vLLM's weight transfer), which needs a GPU for the server that no
trainer process uses: `check_nccl_devices` says so before anything is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from ratchet.errors import UserError
from tasks.sync.server import ServerSettings, VllmServer
from tasks.sync.server_client import ServerClient
from tasks.sync.versioned import (
    AdapterSampler,
    AdapterSync,
    MergedSync,
    VersionedGeneration,
    replaced,
)


class ServerGeneration(VersionedGeneration):
    """The server is started here, with `ServerSettings`."""

    settings: ServerSettings

    def _init_vllm(self) -> None:
        if self.accelerator.is_main_process:
            server = VllmServer(self.settings, self.model.config.get_text_config())
            try:
                self.vllm_client = ServerClient(server)
                self._check_settings()
            except BaseException:
                server.close()
                raise
        self.accelerator.wait_for_everyone()

    def _check_settings(self) -> None:
        """RuntimeError when the server runs with other settings than it was given."""
        wanted = {
            "dtype": f"torch.{self.settings.spec.dtype}",
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "seed": self.settings.seed,
        }
        found = self.vllm_client.get_server_info()["model_config"]
        for name, value in wanted.items():
            if found[name] != value:
                raise RuntimeError(f"the vLLM server has {name} = {found[name]}, not {value}")

    def close(self) -> None:
        """Stop the server."""
        if self.accelerator.is_main_process:
            self.vllm_client.close_communicator()
            self.vllm_client.server.close()


class ServerAdapterGeneration(AdapterSync, ServerGeneration):
    """The adapter itself goes to the server, under a version."""

    @property
    def sampler(self) -> AdapterSampler:
        """The server's client."""
        client: AdapterSampler = self.vllm_client
        return client

    def _transfer(self) -> int:
        return super()._transfer() if self.accelerator.is_main_process else 0


class ServerMergedGeneration(MergedSync, ServerGeneration):
    """Every weight goes to the server by NCCL, adapters merged in."""

    def _init_vllm(self) -> None:
        super()._init_vllm()
        if self.accelerator.is_main_process:
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # where the two ends meet
            self.vllm_client.init_communicator(device=self.accelerator.device)

    def _transfer(self) -> int:
        VLLMGeneration.sync_weights(self)  # the first time it reads the weights twice
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize
            for _, dtype, shape in self._weight_metadata
        )


def check_nccl_devices(server_device: str | None, num_trainers: int) -> None:
    """UserError unless a trainer of `num_trainers` processes and a server on `server_device` can
    exchange weights by NCCL, which takes one GPU for each."""
    if not torch.cuda.is_available():
        reason = "sends weights by NCCL, and there is no CUDA device here"
    elif server_device is None:
        reason = "needs a GPU for the server alone: name it in grpo.vllm_server_device"
    elif server_device in _visible_devices()[:num_trainers]:
        reason = f"needs a GPU for the server alone, and the trainer uses {server_device}"
    else:
        return
    raise UserError(
        f"grpo.vllm_mode = 'server' with grpo.sync = 'merged' {reason}; or set grpo.sync = "
        "'adapter' (with LoRA), or grpo.vllm_mode = 'colocate'"
    )


def _visible_devices() -> list[str]:
    """The devices that CUDA counts from 0 here, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    return named.split(",")


@contextmanager
def served(kind: type[ServerGeneration], settings: ServerSettings) -> Iterator[None]:
    """While it lasts, a GRPO trainer that is made gets `kind` as its generation backend."""
    with replaced(grpo_trainer, "VLLMGeneration", partial(kind, settings=settings)):
        yield
