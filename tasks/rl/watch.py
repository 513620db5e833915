"""What a person is told while training runs."""

from __future__ import annotations

from typing import Any

from tasks.context import StageContext


class Watch:
    """Reads the figures of each step."""

    def __init__(self, ctx: StageContext, num_steps: int) -> None:
        self.ctx = ctx
        self.num_steps = num_steps

    def __call__(self, step: int, figures: dict[str, Any]) -> None:
        """Called after each optimizer step."""
        reward, live = figures.get("reward"), figures.get("live_share")
        note = "" if reward is None else f"reward {reward:.3f}, live groups {live:.0%}"
        self.ctx.progress(step, self.num_steps, "steps", note)
