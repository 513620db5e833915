"""Adapter versions: the trainer's LoRA weights on disk, each under the step that made them.

A version is a folder `version-<step>` in PEFT's format. It is written to a hidden sibling and
renamed, so a sampler that opens a version never sees half of one. The base weights are not
touched: nothing is merged, so nothing has to be unmerged and nothing is rounded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file

ADAPTER = "default"
"""Name of the trained adapter in the PEFT model."""
WEIGHTS = "adapter_model.safetensors"
"""PEFT's name for the file of an adapter's weights."""


@dataclass(frozen=True)
class AdapterVersion:
    """One version of the adapter on disk."""

    step: int
    """Optimizer steps it has seen."""
    folder: Path
    num_bytes: int
    """Size of its weights."""

    @property
    def name(self) -> str:
        """Name by which a sampler knows it."""
        return self.folder.name

    @property
    def adapter_id(self) -> int:
        """A number by which a sampler knows it; samplers count from 1."""
        return self.step + 1

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its weights as they lie on disk."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                yield name, file.get_tensor(name)


def save_adapter(model: PeftModel, folder: Path) -> int:
    """Write the adapter's weights and configuration into `folder`; returns the weights' bytes."""
    folder.mkdir(parents=True)
    weights = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)
    return sum(value.nbytes for value in weights.values())


class AdapterVersions:
    """The adapter versions in a folder of their own, which is emptied first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)

    def save(self, model: PeftModel, step: int) -> AdapterVersion:
        """Write the adapter as it is now, after `step` optimizer steps."""
        folder = self.root / f"version-{step:06d}"
        unfinished = folder.with_name(f".{folder.name}")
        num_bytes = save_adapter(model, unfinished)
        unfinished.rename(folder)
        return AdapterVersion(step, folder, num_bytes)

    def remove(self, version: AdapterVersion) -> None:
        """Delete a version that no sampler uses any more."""
        shutil.rmtree(version.folder)
