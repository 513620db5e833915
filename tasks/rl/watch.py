"""What a person is told while training runs: progress, and a warning when drift leaves its band."""

from __future__ import annotations

from typing import Any

from tasks.context import StageContext

BASELINE_STEPS = 3
"""Steps whose mean drift is the level that later ones are compared with."""
DRIFT_FACTOR = 10.0
"""Drift above this multiple of the level is out of the band."""
DRIFT_FLOOR = 1e-3
"""Drift below this, in nats per token, is never warned about."""


class Watch:
    """Reads the figures of each step."""

    def __init__(self, ctx: StageContext, num_steps: int) -> None:
        self.ctx = ctx
        self.num_steps = num_steps
        self.first: list[float] = []
        self.num_warnings = 0

    def __call__(self, step: int, figures: dict[str, Any]) -> None:
        """Called after each optimizer step."""
        reward, live = figures.get("reward"), figures.get("live_share")
        note = "" if reward is None else f"reward {reward:.3f}, live groups {live:.0%}"
        self.ctx.progress(step, self.num_steps, "steps", note)
        drift = figures.get("drift_mean")
        if drift is not None:
            self._compare(step, drift)

    def _compare(self, step: int, drift: float) -> None:
        if len(self.first) < BASELINE_STEPS:
            self.first.append(drift)
            return
        level = sum(self.first) / len(self.first)
        if drift > max(DRIFT_FACTOR * level, DRIFT_FLOOR):
            self.num_warnings += 1
            self.ctx.log(
                f"warning: at step {step} the sampler's log-probabilities are {drift:.1e} nats per "
                f"token away from the trainer's, {drift / max(level, 1e-12):.0f} times the level "
                "of the first steps: the two may no longer be the same policy"
            )
