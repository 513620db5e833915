"""Which tensors TRL's server mode sends to vLLM without their adapter.

TRL (1.11 to 1.16) merges the adapter, hands out views of the merged weights one by one and takes
the merge back, in place, when the last one has been asked for. vLLM's packer only remembers the
views; it copies them once more than `BUFFER_BYTES` have come together, or when there are no more,
which is after the merge was taken back. So whatever came after the last copy reaches the sampler as
base weights, with no error anywhere. `docs/drift.md` explains it for people who use TRL directly.

This is arithmetic over sizes; nothing is loaded or sent:

    python -m benchmarks.packing Qwen/Qwen2.5-0.5B-Instruct bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

BUFFER_BYTES = 2**30
"""vLLM's buffer; TRL doesn't change it."""


@dataclass(frozen=True)
class WireTensor:
    """One tensor that a sync sends."""

    name: str
    num_bytes: int
    adapted: bool
    """An adapter on every linear layer but the head changes it."""


def num_unflushed(sizes: Sequence[int], buffer_bytes: int = BUFFER_BYTES) -> int:
    """How many of the last tensors are still uncopied when the iterator ends.

    `sizes` are bytes in the order of sending. The packer copies what it holds as soon as that is
    more than `buffer_bytes`.
    """
    held_bytes = held = 0
    for size in sizes:
        held_bytes += size
        held += 1
        if held_bytes > buffer_bytes:
            held_bytes = held = 0
    return held


def wire_tensors(config: PretrainedConfig, dtype: torch.dtype) -> list[WireTensor]:
    """The tensors of a model in the order in which TRL sends them; tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    head = model.get_output_embeddings()
    adapted = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    return [
        WireTensor(name, parameter.nbytes, name in adapted)
        for name, parameter in model.named_parameters()
    ]


def stale_layers(tensors: Sequence[WireTensor], buffer_bytes: int = BUFFER_BYTES) -> list[str]:
    """Names of the adapted tensors that arrive as base weights."""
    count = num_unflushed([tensor.num_bytes for tensor in tensors], buffer_bytes)
    return [tensor.name for tensor in tensors[len(tensors) - count :] if tensor.adapted]


def main(path: str, dtype: str) -> None:
    """Print the share of a model's adapted layers that would stay stale."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    tensors = wire_tensors(config, getattr(torch, dtype))
    stale = stale_layers(tensors)
    adapted = sum(tensor.adapted for tensor in tensors)
    size = sum(tensor.num_bytes for tensor in tensors)
    print(f"{path} in {dtype}: {size / 1e6:,.0f} MB on the wire")
    print(
        f"stale after a stock sync: {len(stale)} of {adapted} layers ({len(stale) / adapted:.0%})"
    )
    if stale:
        print(f"from {stale[0]} to {stale[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
