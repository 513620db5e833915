"""Whether the weights that a LoRA run doesn't train are still what they were.

A merge and unmerge in place, an optimizer that was given too much, a hook that writes: each leaves
the base a little changed, and every later step trains another model than the one that is saved
beside the adapter. A checksum over the bits of each tensor notices a change of one of them.
"""

from __future__ import annotations

import torch


def frozen_checksums(model: torch.nn.Module) -> dict[str, int]:
    """Checksum of every parameter that isn't trained, by name."""
    return {
        name: int(torch.hash_tensor(parameter.detach()).item())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def changed(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Names of the parameters whose bits differ, in the model's order."""
    return [name for name, value in before.items() if after[name] != value]
