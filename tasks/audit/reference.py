"""What the sampler should hold: the trainer's weights, worked out apart from any merge.

A `Reference` copies the base weights when an audit begins, and each version's adapter (or, in full
fine-tuning, all weights) when it is about to be synced. What a merged tensor should be is then
W + s·B·A in float64 from these copies, whatever PEFT does to the model in between. It costs host
memory for one copy of the model, three in full fine-tuning.

Versions are random: fresh adapters are zero in B, and at zero most faults of a sync are invisible.
Where adapters are merged, a version changes one norm as well, the *mark*. No adapter is in it, so a
sampler that has the new mark and the old layers got tensors without their adapter, and one that has
the old mark got nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from tasks.sync.adapter import ADAPTER

UPDATE_SHARE = 0.05
"""Size of a version's update against the weights it changes (Frobenius norms): far above any
rounding (bfloat16: 0.002 of a weight), and small enough for a model to stay one."""
HEAD, TIED_TO = "lm_head.weight", "model.embed_tokens.weight"

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embeddings", ("embed_tokens",)),
    ("head", ("lm_head",)),
    ("norms", ("norm",)),
    ("attention q", ("q_proj",)),
    ("attention k", ("k_proj",)),
    ("attention v", ("v_proj",)),
    ("attention o", ("o_proj",)),
    ("mlp", ("mlp",)),
)
OTHER = "other"
GROUP_NAMES = (*(name for name, _ in GROUPS), OTHER)


def group_of(name: str) -> str:
    """The layer group that a weight belongs to."""
    for group, marks in GROUPS:
        if any(mark in name for mark in marks):
            return group
    return OTHER


def checkpoint_name(name: str) -> str:
    """A parameter of a PEFT model by its name in the checkpoint."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


@dataclass(frozen=True)
class Adapter:
    """One layer's part of an adapter version."""

    a: torch.Tensor
    """Shape (rank, inputs)."""
    b: torch.Tensor
    """Shape (outputs, rank)."""
    scale: float

    def update(self) -> torch.Tensor:
        """s·B·A in float64."""
        return self.scale * (self.b.double() @ self.a.double())


Version = dict[str, Adapter | torch.Tensor]


class Reference:
    """The weights of the versions of `model`, a PEFT model or one that is trained whole.

    `merged`: its adapters are merged for a sync, so versions carry a mark.
    """

    def __init__(self, model: Any, *, merged: bool) -> None:
        self.model = model
        self.layers: dict[str, LoraLayer] = {
            f"{checkpoint_name(name)}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        self.base = {name: value.detach().cpu().clone() for name, value in self._own().items()}
        norms = [name for name in self.base if group_of(name) == "norms"]
        self.mark = norms[-1] if self.by_adapter and merged and norms else None
        self.current = self.previous = self._version()

    @property
    def by_adapter(self) -> bool:
        """Whether only adapters change."""
        return bool(self.layers)

    @property
    def names(self) -> list[str]:
        """Every weight of the model, as in the checkpoint; tied ones once."""
        return list(self.base)

    def changing(self, name: str) -> bool:
        """Whether versions differ in this weight."""
        return self._untied(name) in self.current

    def expected(self, name: str) -> torch.Tensor:
        """What the weight is in the newest version; float64 where an adapter is part of it."""
        return self._value(name, self.current)

    def before(self, name: str) -> torch.Tensor:
        """What it was in the version before."""
        return self._value(name, self.previous)

    def at_base(self, name: str) -> torch.Tensor:
        """What it is without any update."""
        return self.base[self._untied(name)]

    def knows(self, name: str) -> bool:
        """Whether the trainer has this weight, itself or tied to another."""
        return self._untied(name) in self.base

    def redraw(self, seed: int) -> None:
        """Give the model new random weights for a version: a new adapter, or in full fine-tuning
        the base plus noise."""
        draw = torch.Generator().manual_seed(seed)
        for name, layer in self.layers.items():
            _redraw_adapter(layer, self.base[name], draw)
        own = self._own()
        for name in [self.mark] if self.mark else [] if self.by_adapter else list(own):
            base = self.base[name]
            noise = torch.randn(base.shape, generator=draw)
            size = UPDATE_SHARE * float(base.float().square().mean().sqrt())
            own[name].data.copy_((base.float() + (size or UPDATE_SHARE) * noise).to(base.dtype))
        self.previous, self.current = self.current, self._version()

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The newest adapter under the names of PEFT's file."""
        found: dict[str, torch.Tensor] = {}
        for name, part in self.current.items():
            if not isinstance(part, Adapter):
                continue
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"], found[f"{stem}.lora_B.weight"] = part.a, part.b
        return found

    def base_moved(self) -> dict[str, float]:
        """How far each frozen weight of the trainer is from what it was when the audit began,
        relative to its size."""
        if not self.by_adapter:
            return {}
        return {
            name: relative(self.base[name], value)
            for name, value in self._own().items()
            if name != self.mark
        }

    def _own(self) -> dict[str, torch.Tensor]:
        return {
            checkpoint_name(name): value
            for name, value in self.model.named_parameters()
            if ".lora_" not in name
        }

    def _version(self) -> Version:
        if not self.by_adapter:
            return {name: value.detach().cpu().clone() for name, value in self._own().items()}
        mark = {self.mark: self._own()[self.mark].detach().cpu().clone()} if self.mark else {}
        return mark | {
            name: Adapter(
                layer.lora_A[ADAPTER].weight.detach().cpu().clone(),
                layer.lora_B[ADAPTER].weight.detach().cpu().clone(),
                layer.scaling[ADAPTER],
            )
            for name, layer in self.layers.items()
        }

    def _value(self, name: str, version: Version) -> torch.Tensor:
        name = self._untied(name)
        part = version.get(name)
        if isinstance(part, Adapter):
            return self.base[name].double() + part.update()
        return self.base[name] if part is None else part

    def _untied(self, name: str) -> str:
        """The embedding's name for a head that is tied to it."""
        return TIED_TO if name == HEAD and HEAD not in self.base else name


def relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ (Frobenius); the plain distance where that is zero."""
    found = found.detach().cpu()
    if found.dtype == expected.dtype and torch.equal(expected, found):
        return 0.0
    distance = float((found.double() - expected.double()).norm())
    return distance / (float(expected.double().norm()) or 1.0)


def _redraw_adapter(layer: LoraLayer, base: torch.Tensor, draw: torch.Generator) -> None:
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    new_a = torch.randn(a.shape, generator=draw)
    new_b = torch.randn(b.shape, generator=draw)
    # ‖B·A‖² = tr(BᵀB·AAᵀ): no need to form the product.
    product = float(((new_b.T @ new_b) * (new_a @ new_a.T)).sum().sqrt())
    size = UPDATE_SHARE * (float(base.float().norm()) or 1.0)
    new_b *= size / (product * abs(layer.scaling[ADAPTER]))
    a.data.copy_(new_a)
    b.data.copy_(new_b)
