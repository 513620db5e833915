"""One weight against what it should be: how far off, and what it is instead.

For a weight that the version changed, the measure is the share of the update that is missing,
‖found − expected‖ / ‖expected − previous‖: 0 for a whole sync, 1 for a weight left as it was. For
others it is ‖found − expected‖ / ‖expected‖.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from tasks.audit.reference import Reference, relative

UPDATE_LIMIT = {"float32": 1e-4, "bfloat16": 0.2}
"""Share of the update that rounding may cost, where the update is 1/20 of the weight. In float32 a
weight is rounded by at most 6e-8 of itself, 1.2e-6 of the update; a merge in bfloat16 rounds by at
most 2^-9 of the weight, 4% of the update. The limits leave room above that; a stale weight is at
1."""
WEIGHT_LIMIT = {"float32": 1e-6, "bfloat16": 2**-8}
"""Relative error that rounding may cost where nothing was changed: a copy that went through the
number format once more."""
NEAR = 0.25
"""Share of the update below which a weight counts as being the one it is compared with."""
ROUNDED_BELOW = 0.3
"""Relative error up to which a weight counts as rounded (4-bit codes: 0.1 to 0.2), beyond which it
is another one."""


class Instead(StrEnum):
    """What a wrong weight is."""

    SHAPE = "of another shape"
    BROKEN = "not finite"
    PREVIOUS = "that of the version before"
    BASE = "the base weight, without any update"
    BFLOAT16 = "the right one rounded to bfloat16"
    ROUNDED = "near the right one, rounded"
    OTHER = "another one"


@dataclass(frozen=True)
class Compared:
    """One weight against what it should be."""

    name: str
    error: float
    limit: float
    instead: Instead | None
    """None for a weight that is right."""

    @property
    def ok(self) -> bool:
        """Whether it is right."""
        return self.instead is None


def compare(reference: Reference, name: str, found: torch.Tensor, dtype: str) -> Compared:
    """Weight `name` of the newest version against `found`; `dtype` is the engine's."""
    expected, found = reference.expected(name), found.detach().cpu()
    changing = reference.changing(name)
    limit = (UPDATE_LIMIT if changing else WEIGHT_LIMIT)[dtype]
    if found.shape != expected.shape:
        return Compared(name, float("inf"), limit, Instead.SHAPE)
    error = relative(expected, found)
    if error == 0:
        return Compared(name, 0.0, limit, None)
    if not bool(found.isfinite().all()):
        return Compared(name, float("inf"), limit, Instead.BROKEN)
    if changing:
        found, expected = found.double(), expected.double()
        update = float((expected - reference.before(name).double()).norm())
        error = float((found - expected).norm()) / update if update else error
    instead = None if error <= limit else _instead(reference, name, found, expected)
    return Compared(name, error, limit, instead)


def _instead(
    reference: Reference, name: str, found: torch.Tensor, expected: torch.Tensor
) -> Instead:
    for candidate, instead in (
        (reference.at_base(name), Instead.BASE),
        (reference.before(name), Instead.PREVIOUS),
    ):
        distance = float((expected.double() - candidate.double()).norm())
        if distance and float((found.double() - candidate.double()).norm()) < NEAR * distance:
            return instead
    # Twice, because float32 to bfloat16 after float64 to float32 can round a tie the other way.
    if relative(expected.float().bfloat16().double(), found) < 2**-12:
        return Instead.BFLOAT16
    return Instead.ROUNDED if relative(expected, found) < ROUNDED_BELOW else Instead.OTHER
