"""Control variants: the run's RL on a reward that knows nothing of the right answer.

What a control gains, RL's machinery gains without any maths being rewarded: some models improve on
rewards drawn at random (Shao et al. 2025, "Spurious Rewards"), most on format alone. A gain of the
real run counts as learnt maths as far as it exceeds its controls.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from ratchet.config.run import Control, PromptFormat, RewardsConfig
from ratchet.errors import UserError

RANDOM_REWARD = "ratchet.pipeline.controls:coin"
FORMAT_REWARDS = ("format_check", "tag_check", "solution_number_check", "boxed_format")


def coin(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """1 or 0 with equal chances, whatever is answered.

    Drawn from the text and its place in the batch, so that a resumed run repeats its draws and
    equal completions of one group still differ in their reward.
    """
    return [
        float(sha256(f"{place} {text}".encode()).digest()[0] & 1)
        for place, text in enumerate(completions)
    ]


def control_rewards(
    control: Control, rewards: RewardsConfig, prompt_format: PromptFormat
) -> RewardsConfig:
    """The rewards of a control variant: a coin, or the run's own without those that see the answer.

    UserError where the run has no reward for the format alone.
    """
    from ratchet.prompts import STYLE_OF
    from ratchet.rewards.weights import default_weights

    if control is Control.RANDOM:
        return RewardsConfig(weights={RANDOM_REWARD: 1.0})
    own = rewards.weights or default_weights(STYLE_OF[prompt_format])
    kept = {name: weight for name, weight in own.items() if name in FORMAT_REWARDS}
    if not kept:
        raise UserError(
            f"evaluate.controls: '{control}' needs a reward for the format in rewards.weights, one "
            f"of {', '.join(FORMAT_REWARDS)}"
        )
    return RewardsConfig(weights=kept)
