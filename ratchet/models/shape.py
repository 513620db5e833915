"""What of a model decides how much memory it takes, read from its files without loading it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import UserError
from ratchet.models.check import (
    SEEDLING,
    Kind,
    kind_of,
    local_folder,
    packaged_model_dir,
    read_config,
    tensor_shapes,
    text_config,
    weight_files,
)

LINEAR = re.compile(r"\.layers\.\d+\..*\.weight$")
"""Tensors of a layer; those with two dimensions are linear."""
WIDTHS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    adapted_width: int
    """Inputs plus outputs of every linear layer but the head, summed: parameters of an adapter of
    rank 1."""

    def kv_token_bytes(self, number_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * number_bytes


def model_folder(path: str, revision: str | None) -> Path | None:
    """The folder that holds a model's files: its own, or its place in the hub's local cache. None
    where it lies in neither yet, as a model that is still to be fetched (whole: a cache may hold
    its configuration alone) or converted."""
    kind = kind_of(path)
    if kind is Kind.LOCAL:
        return local_folder(path)
    if kind is Kind.PACKAGED:
        return packaged_model_dir(path) if path == SEEDLING else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    try:
        weight_files(folder)
    except UserError:
        return None
    return folder


def shape_of(folder: Path) -> ModelShape | None:
    """Sizes of the model in `folder`; None for an architecture that names them otherwise."""
    config = text_config(read_config(folder))
    if any(config.get(name) is None for name in WIDTHS):
        return None
    vocab, hidden, intermediate, layers, heads = (int(config[name]) for name in WIDTHS)
    shapes: dict[str, list[int]] = {}
    for file in weight_files(folder):
        shapes |= tensor_shapes(file)
    return ModelShape(
        num_parameters=sum(map(math.prod, shapes.values())),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        adapted_width=sum(
            sum(shape)
            for name, shape in shapes.items()
            if len(shape) == 2 and LINEAR.search(name) is not None
        ),
    )
