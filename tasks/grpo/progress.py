"""What a person is told while training runs: progress, and what seems to hold the run back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.diagnostics.doctor import Diagnosis, examine
from ratchet.rollouts.training_log import StepRecords
from ratchet.rollouts.training_run import evidence_of
from tasks.runtime.context import StageContext

EXAMINE_EVERY = 10
"""Steps between two looks of the doctor."""
EXAMINED_STEPS = 3
"""Newest steps whose completions it reads then."""


class Watch:
    """Reads the figures of each step.

    `config` holds the sections of the stage as JSON values, `adapter` the adapter's configuration.
    """

    def __init__(
        self,
        ctx: StageContext,
        num_steps: int,
        records: StepRecords,
        config: Mapping[str, Any],
        adapter: Mapping[str, Any] | None,
    ) -> None:
        self.ctx = ctx
        self.num_steps = num_steps
        self.records = records
        self.config = config
        self.adapter = adapter
        self.told: set[Diagnosis] = set()

    def __call__(self, step: int, figures: Mapping[str, Any]) -> None:
        """Called after each optimizer step."""
        reward, live = figures.get("reward"), figures.get("live_share")
        note = "" if reward is None else f"reward {reward:.3f}, live groups {live:.0%}"
        self.ctx.progress(step, self.num_steps, "steps", note)
        if step % EXAMINE_EVERY == 0:
            self._examine(step)

    def _examine(self, step: int) -> None:
        """Tell what seems to hold the run back, each diagnosis once."""
        first = max(1, step - EXAMINED_STEPS + 1)
        rows = [row for one in range(first, step + 1) for row in self.records.rollouts_of(one)]
        evidence = evidence_of(self.config, self.records.metrics(), rows, self.adapter)
        for finding in examine(evidence):
            if finding.diagnosis not in self.told:
                self.told.add(finding.diagnosis)
                self.ctx.log(
                    f"doctor, step {step}: {finding.diagnosis}: {finding.seen}. {finding.advice}"
                )
