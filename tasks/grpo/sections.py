"""The configuration sections of the GRPO stage, kept together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)


@dataclass(frozen=True)
class Sections:
    """What the stage is given."""

    model: ModelConfig
    prompt: PromptConfig
    sampler: SamplerConfig
    rewards: RewardsConfig
    grpo: GrpoConfig
    guard: GuardConfig
    wandb: WandbConfig

    def as_json(self) -> dict[str, Any]:
        """The sections by name, as JSON values."""
        return {
            field.name: getattr(self, field.name).model_dump(mode="json") for field in fields(self)
        }
