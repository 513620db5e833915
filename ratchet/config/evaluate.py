"""The section of the configuration that measures: decoding, further variants, controls."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from ratchet.config.base import Section

OWN_VARIANTS = ("baseline", "warmstart", "rl")
RESERVED = ("questions", *OWN_VARIANTS)


class Control(StrEnum):
    """RL on a reward that teaches no maths, otherwise as in the run."""

    RANDOM = "random-reward"
    FORMAT = "format-reward"


class VariantConfig(Section):
    """A further model that answers the held-out questions."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Its name in tables and reports; lower case, digits, dot, dash and underscore."""
    path: str = Field(min_length=1)
    """Hub id, local directory (any checkpoint), or a packaged model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); none for local models."""


class EvaluateConfig(Section):
    """The final comparison."""

    samples: int = Field(default=0, ge=0)
    """Completions per question at `temperature`, beside the greedy one; 0 = greedy only."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled completions."""
    band_samples: int = Field(default=0, ge=0)
    """Further completions per question of the starting model that make difficulty bands by its
    pass rate; 0 = the bands of the sources."""
    shard_questions: int = Field(default=1024, ge=1)
    """Questions per shard."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Level of all intervals."""
    variants: tuple[VariantConfig, ...] = ()
    """Further models in the comparison: published ones, other checkpoints."""
    controls: tuple[Control, ...] = ()
    """Control variants; each costs another RL run."""

    @model_validator(mode="after")
    def _names_apart(self) -> EvaluateConfig:
        names = [variant.name for variant in self.variants] + [
            control.value for control in self.controls
        ]
        for name in names:
            if name in RESERVED:
                raise ValueError(
                    f"variant name '{name}' is taken: choose another for evaluate.variants"
                )
            if names.count(name) > 1:
                raise ValueError(f"two variants are called '{name}': give each its own name")
        return self

    @property
    def alone(self) -> EvaluateConfig:
        """What a variant's own evaluation depends on: everything but who else is compared."""
        return self.model_copy(update={"variants": (), "controls": ()})
