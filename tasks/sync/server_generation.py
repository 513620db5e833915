"""TRL's generation backend with the sampler in a server of our own.

`ServerAdapterGeneration` and `ServerMergedGeneration` take the place of `VLLMGeneration` in server
mode; what they share with a colocated engine is in `tasks.sync.versioned`. The server belongs to
the trainer's main process, which also talks to it; other processes can sync and sample, which they
do together with it. Everything goes over HTTP but for the weights that are read back, which the
server's worker writes to a file.

Merged weights travel by NCCL (vLLM's weight transfer), which needs a GPU for the server that no
trainer process uses: `check_nccl_devices` says so before anything is loaded.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from trl.generation.vllm_generation import VLLMGeneration

from ratchet.errors import UserError
from ratchet.resources.device import cuda_names
from tasks.sync.server import ServerSettings, VllmServer
from tasks.sync.server_client import ServerClient
from tasks.sync.types import SAMPLING_FIELDS, EngineFacts, Sampled, as_sampled
from tasks.sync.versioned import AdapterSync, MergedSync, VersionedGeneration

API_DEFAULTS = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What vLLM's API takes where a request says nothing and the server has no defaults of its own."""


class ServerGeneration(VersionedGeneration):
    """The server is started here, with `ServerSettings`."""

    settings: ServerSettings
    vllm_client: ServerClient
    """What talks to the server, in the trainer's main process."""

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

    def _sample(self, prompts: list[list[int]], n: int) -> list[Sampled]:
        """The server tells a request's use of the prefix cache for one completion only, the last.
        So the very first completion has a request to itself, and its count is its own."""
        first, others = prompts[:1], prompts[1:]
        requests = ((first, 1), (first, n - 1), (others, n))
        return [one for some, k in requests if some and k for one in self._request(some, k)]

    def _request(self, prompts: list[list[int]], n: int) -> list[Sampled]:
        repeated = [prompt for prompt in prompts for _ in range(n)]
        answer = self.generate(repeated, None, n)
        cached = None
        if self.accelerator.is_main_process:
            assert self.vllm_client.last_usage is not None
            cached = self.vllm_client.last_usage["prompt_tokens_details"]["cached_tokens"]
        return as_sampled(answer, [cached] * len(repeated))

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `VersionedGeneration.score`."""
        return self.vllm_client.score(token_ids)

    def effective_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `VersionedGeneration.effective_weights`; the server must see this machine's files."""
        with tempfile.TemporaryDirectory(prefix="ratchet-weights-") as folder:
            path = Path(folder) / "weights.safetensors"
            self.vllm_client.call_worker("write_effective_weights", str(path))
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    yield name, file.get_tensor(name)

    def facts(self) -> EngineFacts:
        """See `VersionedGeneration.facts`."""
        info = self.vllm_client.get_server_info()
        model, cache, lora = (
            None if (config := info[name]) is None else SimpleNamespace(**config)
            for name in ("model_config", "cache_config", "lora_config")
        )
        sampling = None
        if (request := self.vllm_client.last_request) is not None:
            sampling = {name: (API_DEFAULTS | request)[name] for name in SAMPLING_FIELDS}
        return EngineFacts.of(
            model,
            cache,
            lora,
            mode="server",
            logprobs_mode=info["model_config"]["logprobs_mode"],
            vocab_rows=int(self.vllm_client.call_worker("count_vocab_rows") or 0),
            sampling=sampling,
        )

    def close(self) -> None:
        """Stop the server."""
        if self.accelerator.is_main_process:
            self.vllm_client.close_communicator()
            self.vllm_client.server.close()


class ServerAdapterGeneration(AdapterSync, ServerGeneration):
    """The adapter itself goes to the server, under a version."""

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
    elif server_device in cuda_names()[:num_trainers]:
        reason = f"needs a GPU for the server alone, and the trainer uses {server_device}"
    else:
        return
    raise UserError(
        f"grpo.vllm_mode = 'server' with grpo.sync = 'merged' {reason}; or set grpo.sync = "
        "'adapter' (with LoRA), or grpo.vllm_mode = 'colocate'"
    )
