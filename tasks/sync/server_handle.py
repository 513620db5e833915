"""The audit's handle of a sampler in a server of our own: everything over HTTP, the ways that
training uses, but for the weights, which the server's worker writes to a file that is read here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tasks.sync.handle import SAMPLING_FIELDS, EngineFacts, OnWire, Sampled
from tasks.sync.server_client import ServerClient
from tasks.sync.server_generation import ServerGeneration
from tasks.sync.versioned import SyncRecord

API_DEFAULTS = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What vLLM's API takes where a request says nothing and the server has no defaults of its own."""


@dataclass
class ServerHandle:
    """The handle of TRL's backend with a server. The trainer's main process has the client; others
    can sync and sample, which they do together with it."""

    generation: ServerGeneration

    @property
    def client(self) -> ServerClient:
        """What talks to the server."""
        client: ServerClient = self.generation.vllm_client
        return client

    def sync(self, step: int, on_wire: OnWire | None = None) -> SyncRecord:
        """See `SamplerHandle.sync`."""
        return self.generation.sync_as(step, on_wire)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, temperature: float, max_tokens: int
    ) -> list[Sampled]:
        """See `SamplerHandle.sample`.

        The server tells a request's use of the prefix cache for one completion only, the last. So
        the very first completion has a request to itself, and its count is its own.
        """
        backend = self.generation
        before = backend.temperature, backend.max_completion_length
        backend.temperature, backend.max_completion_length = temperature, max_tokens
        first, *others = [list(prompt) for prompt in prompts]
        try:
            found = self._sample([first], 1)
            if n > 1:
                found += self._sample([first], n - 1)
            if others:
                found += self._sample(others, n)
            return found
        finally:
            backend.temperature, backend.max_completion_length = before

    def _sample(self, prompts: list[list[int]], n: int) -> list[Sampled]:
        """One request."""
        repeated = [prompt for prompt in prompts for _ in range(n)]
        _, completions, logprobs, _ = self.generation.generate(repeated, None, n)
        cached = None
        if self.generation.accelerator.is_main_process:
            assert self.client.last_usage is not None
            cached = self.client.last_usage["prompt_tokens_details"]["cached_tokens"]
        return [
            Sampled(prompt, list(ids), [one[0] for one in values], cached)
            for prompt, ids, values in zip(repeated, completions, logprobs, strict=True)
        ]

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `SamplerHandle.score`."""
        return self.client.score(token_ids)

    def effective_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `SamplerHandle.effective_weights`; the server must see this machine's files."""
        with tempfile.TemporaryDirectory(prefix="ratchet-weights-") as folder:
            path = Path(folder) / "weights.safetensors"
            self.client.call_worker("write_effective_weights", str(path))
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    yield name, file.get_tensor(name)

    def facts(self) -> EngineFacts:
        """See `SamplerHandle.facts`."""
        info = self.client.get_server_info()
        model, cache, lora = info["model_config"], info["cache_config"], info["lora_config"]
        return EngineFacts(
            mode="server",
            dtype=model["dtype"].removeprefix("torch."),
            kv_cache_dtype=cache["cache_dtype"],
            quantization=model["quantization"],
            logprobs_mode=model["logprobs_mode"],
            vocab_rows=int(self.client.call_worker("count_vocab_rows") or 0),
            max_model_len=model["max_model_len"],
            block_size=cache["block_size"],
            prefix_caching=bool(cache["enable_prefix_caching"]),
            lora_rank=None if lora is None else lora["max_lora_rank"],
            sampling=_sampling(self.client.last_request),
        )

    def reset_prefix_cache(self) -> bool:
        """See `SamplerHandle.reset_prefix_cache`."""
        answer = self.client.request("POST", "/reset_prefix_cache").json()
        return bool(answer["success"])


def _sampling(request: Mapping[str, Any] | None) -> dict[str, float | int] | None:
    """What of a request changes the distribution that is sampled from."""
    if request is None:
        return None
    said = API_DEFAULTS | dict(request)
    return {name: said[name] for name in SAMPLING_FIELDS}
