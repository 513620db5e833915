"""TRL's server-mode weight sync as it is, run on a CPU: what it really ships.

Not a test module. TRL's `sync_weights`, its client and vLLM's packer and unpacker are the real
ones; only CUDA streams, the NCCL group and HTTP are replaced, none of which touches a tensor.

* `ship(model)` runs one sync of a trainer without a sampler and returns what arrives.
* `StockPackedGeneration` is a generation backend on a colocated engine that loads exactly that;
  `stock_packing(packing)` puts it in the place of our merged sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from vllm.distributed.weight_transfer import packed_tensor

from benchmarks.packing import BUFFER_BYTES, WireTensor, stale_layers, wire_tensors
from tasks.sync import generation

Shipped = list[tuple[str, torch.Tensor]]
Metadata = list[tuple[str, str, list[int]]]


class InstantStream:
    """A CUDA stream whose work is done when it is asked for, as on a CPU."""

    def synchronize(self) -> None:
        """Nothing is pending."""


class Loopback:
    """An NCCL group of two ends in one process: the bytes at the moment of the broadcast."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()
        self.receiving = False

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Keep the bytes, or on the receiving end hand them out."""
        if self.receiving:
            tensor.copy_(self.sent.popleft())
        else:
            self.sent.append(tensor.clone())


@contextmanager
def without_cuda() -> Iterator[None]:
    """vLLM's packer runs on CPU tensors while it lasts."""
    with (
        patch.object(
            packed_tensor, "_get_streams", lambda index, count: (InstantStream(),) * count
        ),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
        patch.object(torch.accelerator, "current_device_index", lambda: 0),
    ):
        yield


class LoopbackClient(VLLMClient):
    """TRL's client, connected to nothing but a `Loopback`."""

    def __init__(self) -> None:
        self.base_url = "http://nowhere"
        self.communicator = Loopback()
        self._updating_weights = False
        self.announced: Metadata = []

    def _post(self, url: str, json: Any = None, **kwargs: Any) -> dict[str, Any]:
        if url.endswith("/update_weights"):
            info = json["update_info"]
            self.announced = list(
                zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
            )
        return {"success": True}

    def received(self, buffer_bytes: int) -> Shipped:
        """What vLLM's receiving end makes of the bytes that were sent."""
        found: Shipped = []
        self.communicator.receiving = True
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter(
                (name, (shape, getattr(torch, dtype))) for name, dtype, shape in self.announced
            ),
            group=self.communicator,
            src=0,
            post_unpack_func=found.extend,
            buffer_size_bytes=buffer_bytes,
            device="cpu",
        )
        return found


def ship_from(backend: VLLMGeneration, buffer_bytes: int = BUFFER_BYTES) -> Shipped:
    """Run TRL's server-mode sync of `backend`; what arrives, in order."""
    client = LoopbackClient()
    packer = partial(packed_tensor.packed_nccl_broadcast_producer, buffer_size_bytes=buffer_bytes)
    backend.mode = "server"
    backend.vllm_client = client
    with without_cuda(), patch.object(vllm_client, "packed_nccl_broadcast_producer", packer):
        VLLMGeneration.sync_weights(backend)
        return client.received(buffer_bytes)


class WithoutSampler(VLLMGeneration):
    """TRL's backend of a trainer that has no sampler."""

    def _init_vllm(self) -> None:
        pass


class CloningWithoutSampler(WithoutSampler):
    """The same, with every tensor copied as it is handed out."""

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._iter_named_params():
            yield name, tensor.clone()


def ship(model: Any, *, clone: bool = False, buffer_bytes: int = BUFFER_BYTES) -> Shipped:
    """What a sampler in a server of its own would get of `model`."""
    kind = CloningWithoutSampler if clone else WithoutSampler
    return ship_from(kind(model, Accelerator(cpu=True), None), buffer_bytes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Packing:
    """A buffer scaled down with the model, in bytes."""

    buffer_bytes: int
    ballast_bytes: int
    """Sent first and thrown away: it stands for the embedding of a real vocabulary, which fills
    the first buffer and which a tiny model lacks."""
    stale_share: float
    """Share of the adapted layers that arrive as base weights."""


def packing_for(config: PretrainedConfig, share: float) -> Packing:
    """The packing that leaves as near as can be `share` of a float32 model's adapted layers stale:
    the buffer is full once, when the layers before those have been sent."""
    tensors = wire_tensors(config, torch.float32)
    ballast = sum(tensor.num_bytes for tensor in tensors)
    adapted = sum(tensor.adapted for tensor in tensors)
    found = []
    for size in accumulate((tensor.num_bytes for tensor in tensors), initial=0):
        buffer = ballast + size
        stale = stale_layers([WireTensor("ballast", ballast, False), *tensors], buffer)
        found.append(Packing(buffer, ballast, len(stale) / adapted))
    return min(found, key=lambda packing: abs(packing.stale_share - share))


class BallastFirst(WithoutSampler):
    """TRL's backend, with some bytes sent before the weights."""

    def __init__(self, *args: Any, ballast_bytes: int) -> None:
        super().__init__(*args)
        self.ballast = torch.zeros(ballast_bytes, dtype=torch.uint8, device=self.model.device)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "ballast", self.ballast
        yield from super()._iter_named_params()


class StockPackedGeneration(generation.MergedGeneration):
    """A colocated engine that gets what TRL's server mode would have sent it.

    Order, views, packing and the moment of the unmerge are TRL's and vLLM's own.
    """

    def __init__(self, *args: Any, packing: Packing, **kwargs: Any) -> None:
        self.packing = packing
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        super()._init_vllm()
        self.stock = BallastFirst(
            self.model, self.accelerator, None, ballast_bytes=self.packing.ballast_bytes
        )

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in ship_from(self.stock, self.packing.buffer_bytes)[1:]:
            self._num_bytes += tensor.nbytes
            yield name, tensor


@contextmanager
def stock_packing(packing: Packing) -> Iterator[None]:
    """While it lasts, a GRPO stage with `sync = 'merged'` syncs as TRL's server mode would."""
    kind = partial(StockPackedGeneration, packing=packing)
    with patch.object(generation, "MergedGeneration", kind):
        yield
