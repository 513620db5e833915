"""A vLLM server of our own: started for one trainer, told everything that decides whether it is the
same policy, and stopped with it.

The number format, the seed, the log-probability mode (that of the distribution that is sampled
from, at any temperature) and the limits on adapters are arguments here; nothing is left to
defaults or to a checkpoint's generation config. The server listens on a free loopback port, runs
under a supervisor (`tasks.runtime.supervisor`), so it ends with the trainer however that ends, and
writes a log whose last lines every failure quotes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import requests
from transformers import PretrainedConfig
from vllm.platforms import current_platform

from tasks.runtime.supervisor import Supervised, free_port
from tasks.runtime.worker import set_environment
from tasks.sampling.engines.vllm_engine import cache_environment
from tasks.sync.engine import EngineSettings
from tasks.sync.readback import Reader
from tasks.sync.types import ServerError

BASE_MODEL = "base"
"""Name of the model without an adapter on the server."""
START_SECONDS = 1200.0
"""A large model that compiles takes minutes; a server that is this late hangs."""
POLL_SECONDS = 0.2
TAIL_LINES = 20
NUM_ERRORS = 3
ERROR = re.compile(r"\w(Error|Exception): ")
OF_THE_TRAINER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that describe the trainer's processes; vLLM would take them for its own."""


@dataclass(frozen=True)
class ServerSettings(EngineSettings):
    """What a server is made with."""

    device: str | None
    """Its `CUDA_VISIBLE_DEVICES`; the trainer's when None."""
    log_file: Path
    log: Callable[[str], None]
    """Told where the server is, for the person who watches."""


def server_command(settings: ServerSettings, port: int) -> list[str]:
    """The command line of the server."""
    spec = settings.spec
    model = Path(spec.location.path)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments: dict[str, str | int | float] = {
        "model": str(model.resolve()) if model.exists() else spec.location.path,
        "served-model-name": BASE_MODEL,
        "host": "127.0.0.1",
        "port": port,
        "dtype": spec.dtype,
        "seed": settings.seed,
        "max-model-len": spec.max_model_len,
        "max-num-seqs": spec.max_num_seqs,
        "gpu-memory-utilization": spec.gpu_memory_utilization,
        "generation-config": "vllm",  # no sampling defaults out of the checkpoint
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": f"{Reader.__module__}.{Reader.__name__}",
    }
    switches = [
        "skip-tokenizer-init",  # token ids go in and come out
        "enable-prompt-tokens-details",  # answers say how much came out of the prefix cache
        "disable-log-stats",
        "disable-uvicorn-access-log",
    ]
    if spec.location.revision is not None:
        arguments["revision"] = spec.location.revision
    if current_platform.is_cpu():
        switches.append("enforce-eager")
    if settings.lora_rank is None:
        arguments["weight-transfer-config"] = json.dumps({"backend": "nccl"})
    else:
        switches.append("enable-lora")
        arguments |= {"max-loras": 1, "max-lora-rank": settings.lora_rank}
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    return command + [f"--{name}" for name in switches]


def server_environment(
    settings: ServerSettings, config: PretrainedConfig, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the server. `config` is the language model's."""
    found = {name: value for name, value in inherited.items() if name not in OF_THE_TRAINER}
    found |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # TRL asks the server for its settings
    }
    if settings.device is not None:
        found["CUDA_VISIBLE_DEVICES"] = settings.device
    return found | cache_environment(config, settings.spec)


class VllmServer:
    """A server that is up when the constructor returns; RuntimeError with its last words if it
    does not come up."""

    def __init__(self, settings: ServerSettings, config: PretrainedConfig) -> None:
        set_environment()
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_file = settings.log_file
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with self.log_file.open("wb") as log:
            self._running = ExitStack()
            self.process = self._running.enter_context(
                Supervised(
                    server_command(settings, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    environment=server_environment(settings, config, os.environ),
                )
            )
        try:
            self._wait_until_up(start + START_SECONDS)
        except BaseException:
            self.close()
            raise
        seconds = time.monotonic() - start
        settings.log(
            f"vLLM server at {self.base_url} (process {self.process.pid}) after {seconds:.0f} s"
        )

    def _wait_until_up(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise self.failure(f"ended with status {code} before it was up")
            if self._is_healthy():
                return
            time.sleep(POLL_SECONDS)
        raise self.failure(f"was not up after {START_SECONDS:.0f} s")

    def _is_healthy(self) -> bool:
        """Whether the server answers that it can serve; a server that starts doesn't listen yet, or
        listens and is too busy to answer. Anything else that goes wrong is raised."""
        try:
            return requests.get(f"{self.base_url}/health", timeout=5).ok
        except (requests.ConnectionError, requests.Timeout):
            return False

    def failure(self, what: str) -> ServerError:
        """An error that says what the server did and quotes its log: the first errors, which are
        the cause, and the end."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines[:-TAIL_LINES] if ERROR.search(line)][:NUM_ERRORS]
        quoted = "\n".join([*errors, *lines[-TAIL_LINES:]])
        return ServerError(f"the vLLM server {what}\nfrom {self.log_file}:\n{quoted}")

    def close(self) -> None:
        """Stop the server and all that it started."""
        self._running.close()
