"""TRL's client of a vLLM server, for a server of our own (`tasks.sync.server`).

Every request names the version that it wants to be answered from, and the answer's version is
checked. Nothing is tried again: the server is on this machine, and what fails has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from tasks.runtime.supervisor import free_port
from tasks.sync.adapter import AdapterVersion
from tasks.sync.server import BASE_MODEL, VllmServer

COMPLETIONS = "/v1/completions"
Metadata = list[tuple[str, str, list[int]]]
"""Name, number format (such as 'bfloat16') and shape of each tensor of a transfer."""


class ServerClient(VLLMClient):
    """A client that samples from one version at a time.

    All methods raise RuntimeError with what the server said, or its last words if it is gone.
    """

    current: AdapterVersion | None = None

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._info: dict[str, Any] | None = None
        self.last_request: dict[str, Any] | None = None
        """Parameters of the newest sampling request."""
        self.last_usage: dict[str, Any] | None = None
        """Token counts of the newest answer."""
        super().__init__(base_url=server.base_url, group_port=free_port())
        self.session = requests.Session()

    def request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """The server's answer, which is a good one."""
        try:
            response = self.session.request(method, self.base_url + path, **kwargs)
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            status = self.server.process.poll()
            ended = "does not answer" if status is None else f"has ended with status {status}"
            raise self.server.failure(ended) from error
        if response.status_code != 200:
            what = f"answered {path} with {response.status_code}: {response.text}"
            if response.status_code >= 500:  # the reason is in its log
                raise self.server.failure(what)
            raise RuntimeError(f"the vLLM server {what}")
        return response

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        path = url.removeprefix(self.base_url)
        answer: dict[str, Any] = self.request("GET", path, **kwargs).json()
        return answer

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        path = url.removeprefix(self.base_url)
        if path != COMPLETIONS:
            answer: dict[str, Any] = self.request("POST", path, **kwargs).json()
            return answer
        self.last_request = kwargs["json"]
        answer = self._complete(kwargs["json"])
        self.last_usage = answer["usage"]
        return answer

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request for completions, which must come from the current version."""
        answer: dict[str, Any] = self.request("POST", COMPLETIONS, json=body).json()
        wanted = BASE_MODEL if self.current is None else self.current.name
        if answer["model"] != wanted:
            raise RuntimeError(f"vLLM sampled from {answer['model']}, not from {wanted}")
        return answer

    def get_server_info(self) -> dict[str, Any]:
        """The server's settings, asked for once: the server takes seconds to collect them."""
        if self._info is None:
            self._info = super().get_server_info()
        return self._info

    def use(self, version: AdapterVersion) -> None:
        """Load `version` and sample from it from now on; the one before is unloaded."""
        previous = self.current
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        self.request("POST", "/v1/load_lora_adapter", json=body)
        if previous is not None:
            body = {"lora_name": previous.name}
            self.request("POST", "/v1/unload_lora_adapter", json=body)
        names = [card["id"] for card in self._get(f"{self.base_url}/v1/models")["data"]]
        if names != [BASE_MODEL, version.name]:
            raise RuntimeError(f"the vLLM server holds {names}, not just {version.name}")
        self.current, self.model = version, version.name

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability at temperature 1 of every token after the first of each sequence.

        One by one: the CPU backend's LoRA can't give several prompts' log-probs at once.
        """
        found = []
        for ids in token_ids:
            body = {
                "model": self.model,
                "prompt": list(ids),
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            }
            (choice,) = self._complete(body)["choices"]
            pairs = zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
            found.append([at[str(token)]["logprob"] for at, token in pairs])
        return found

    def call_worker(self, method: str, *args: str) -> str | None:
        """Have the server's worker run a method of its own; what it returned, as text."""
        body = {"method": method, "args": args}
        (result,) = self._post(f"{self.base_url}/collective_rpc", json=body)["results"]
        return None if result is None else str(result)

    def update_named_params(
        self, metadata: Metadata, named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """TRL's, with every tensor held against what was announced and what the server holds."""
        dtype = self.get_server_info()["model_config"]["dtype"].removeprefix("torch.")
        for name, announced, _ in metadata:
            if announced != dtype:
                raise RuntimeError(f"{name} would be sent in {announced} to a server in {dtype}")
        super().update_named_params(metadata, _as_announced(metadata, named_params))

    def reset_prefix_cache(self) -> None:
        """TRL's; RuntimeError when the server didn't."""
        if not self._post(f"{self.base_url}/reset_prefix_cache")["success"]:
            raise RuntimeError("vLLM did not reset its prefix cache after a weight sync")


def _as_announced(
    metadata: Metadata, named_params: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, each of which must be what was announced in its place."""
    for (name, tensor), announced in zip(named_params, metadata, strict=True):
        found = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if found != announced:
            raise RuntimeError(f"{found} was to be sent where {announced} was announced")
        yield name, tensor
