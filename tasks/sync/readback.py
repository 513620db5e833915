"""The weights that a vLLM model computes with, read back layer by layer.

A linear layer is asked what it does to the identity matrix. That gives the weights in use whatever
form they are kept in (the CPU backend keeps a packed copy only, a quantised layer codes and
scales), and exactly so: every product is with one or zero. A loaded adapter's B·A is added from the
engine's own buffers, where its scale is part of B already. Stacked layers (`qkv_proj`,
`gate_up_proj`) come apart under the checkpoint's names, and the head is read apart from the
embedding even where they are tied, since a backend may keep two copies.

`Reader` is what a vLLM server loads into its worker (`--worker-extension-cls`), where
`/collective_rpc` calls it. All this works on the model of a worker with the whole of it (no tensor
parallelism), in the worker's process. Experts of mixtures, and stacked layers that don't come apart
one to one, are given under the engine's own names, which no checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

PROBE_ROWS = 1024
"""Rows of the identity pushed through a layer at once."""


def adapter_slot(worker: Any, adapter_id: int) -> int:
    """Where the engine keeps a loaded adapter; ValueError when it isn't loaded."""
    slots: list[int | None] = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id
    return slots.index(adapter_id)


@torch.inference_mode()
def effective_weights(model: Any, slot: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Name (as in the checkpoint) and value of every weight that `model`, a vLLM model, uses.

    With `slot` the adapter there is part of its layers, which then come in float64. Values are
    copies on the CPU; embedding and head without the rows that vLLM pads them with.
    """
    stacked: dict[str, list[str]] = model.packed_modules_mapping
    taken: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{above}.") for above in taken):
            continue
        name = _text_name(path.replace(".base_layer", ""))
        if isinstance(module, BaseLinearLayerWithLoRA | LinearBase) and not _is_filter(module):
            taken.append(path)
            yield from _linear(name, module, slot, stacked)
        elif isinstance(module, ParallelLMHead):
            taken.append(path)
            yield f"{name}.weight", _probed(module, module.embedding_dim)[: module.org_vocab_size]
        elif isinstance(module, VocabParallelEmbedding):
            taken.append(path)
            yield f"{name}.weight", module.weight[: module.org_vocab_size].detach().cpu()
        elif not isinstance(module, BaseLayerWithLoRA):
            for own, value in module.named_parameters(recurse=False):
                yield f"{name}.{own}" if name else own, value.detach().cpu().clone()


def _text_name(name: str) -> str:
    """A weight of a language model inside a multimodal one, as in a checkpoint of its own."""
    return name.removeprefix("language_model.")


def _is_filter(module: Any) -> bool:
    """Whether a convolution is kept as a linear layer: its weight is no matrix."""
    layer = module.base_layer if isinstance(module, BaseLinearLayerWithLoRA) else module
    return any(value.ndim > 2 for value in layer.parameters(recurse=False))


def _probed(layer: Any, num_inputs: int) -> torch.Tensor:
    """The weight matrix (outputs, inputs) that `layer` multiplies by, on the CPU."""
    like = next(layer.parameters())
    columns = []
    for start in range(0, num_inputs, PROBE_ROWS):
        rows = min(PROBE_ROWS, num_inputs - start)
        probe = torch.zeros(rows, num_inputs, dtype=_input_dtype(like), device=like.device)
        probe[torch.arange(rows), start + torch.arange(rows)] = 1
        columns.append(layer.quant_method.apply(layer, probe, None).cpu())
    return torch.cat(columns).T.contiguous()


def _input_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What a layer's inputs are in: its own number format, or bfloat16 for quantised codes."""
    return parameter.dtype if parameter.dtype.is_floating_point else torch.bfloat16


def _linear(
    name: str, module: Any, slot: int | None, stacked: dict[str, list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and biases of a linear layer, under the names of the layers stacked in it."""
    wrapped = isinstance(module, BaseLinearLayerWithLoRA)
    layer = module.base_layer if wrapped else module
    assert layer.tp_size == 1, "weights are read back from a model that one worker holds whole"
    parent, _, own = name.rpartition(".")
    names = stacked.get(own, [own])
    if len(names) != len(layer.output_partition_sizes):
        names = [f"{own}[{i}]" for i in range(len(layer.output_partition_sizes))]
    weights = list(_probed(layer, layer.input_size).split(layer.output_partition_sizes))
    if wrapped and slot is not None:
        assert len(module.lora_a_stacked) == len(weights), name
        for i, (a, b) in enumerate(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)):
            update = b[slot, 0].cpu().double() @ a[slot, 0].cpu().double()
            weights[i] = weights[i].double() + update
    biases = None if layer.bias is None else layer.bias.cpu().split(layer.output_partition_sizes)
    for i, part in enumerate(names):
        yield f"{parent}.{part}.weight", weights[i]
        if biases is not None:
            yield f"{parent}.{part}.bias", biases[i].clone()


def vocab_rows(model: Any) -> int:
    """Tokens that the softmax of a vLLM model runs over."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            return int(module.org_vocab_size)
    raise AssertionError("a language model has an embedding")


class Reader:
    """Mixed into a server's worker: what it can be asked for beside vLLM's own requests."""

    def write_effective_weights(self, path: str) -> None:
        """Write the weights that are sampled with, the loaded adapter included, as safetensors."""
        worker: Any = self
        loaded = sorted(worker.list_loras()) if worker.vllm_config.lora_config else []
        assert len(loaded) <= 1, f"one adapter at a time, not {loaded}"
        slot = adapter_slot(worker, loaded[0]) if loaded else None
        weights = dict(effective_weights(worker.get_model(), slot))
        save_file({name: value.contiguous() for name, value in weights.items()}, path)

    def count_vocab_rows(self) -> int:
        """Tokens that the softmax runs over."""
        worker: Any = self
        return vocab_rows(worker.get_model())
