"""What happens beside a GRPO run, step after step: its figures are written down, a person is told
how it goes and what seems to hold it back, and it ends when its tokens are spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.diagnostics.doctor import Ailment, examine
from ratchet.rollouts.training_log import TrainingLog
from ratchet.rollouts.training_run import case_of
from tasks.grpo.rollout import finite
from tasks.runtime.context import StageContext
from tasks.training.callbacks import BoundCallback, ProgressCallback

EXAMINE_EVERY = 10
"""Steps between two looks of the doctor."""
EXAMINED_STEPS = 3
"""Newest steps whose completions it reads then."""
SAMPLED_TOKENS = "sampled_tokens"


class TrainingLogCallback(ProgressCallback):
    """Writes the figures of each step into the training log, tells them, and asks the doctor.

    `config` holds the sections of the stage as JSON values, `adapter` the adapter's configuration.
    """

    def __init__(
        self,
        ctx: StageContext,
        training_log: TrainingLog,
        config: Mapping[str, Any],
        adapter: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(ctx)
        self.training_log = training_log
        self.config = config
        self.adapter = adapter
        self.told: set[Ailment] = set()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Called by the trainer after every step, and once at the end; the first process writes."""
        if "loss" not in logs or not state.is_world_process_zero:
            return
        step = state.global_step
        row = {"step": step} | {name: finite(value) for name, value in logs.items()}
        self.training_log.write_metrics(step, row)
        super().on_log(args, state, control, logs)
        if step % EXAMINE_EVERY == 0:
            self._examine(step)

    def note(self, logs: Mapping[str, Any]) -> str:
        """Reward and live groups, where completions were sampled for the step."""
        reward, live = finite(logs.get("reward")), logs.get("live_share")
        return "" if reward is None else f"reward {reward:.3f}, live groups {live:.0%}"

    def _examine(self, step: int) -> None:
        """Tell what seems to hold the run back, each ailment once."""
        first = max(1, step - EXAMINED_STEPS + 1)
        rows = [row for one in range(first, step + 1) for row in self.training_log.rollouts_of(one)]
        case = case_of(self.config, self.training_log.metrics(), rows, self.adapter)
        for symptom in examine(case):
            if symptom.ailment not in self.told:
                self.told.add(symptom.ailment)
                self.ctx.log(
                    f"doctor, step {step}: {symptom.ailment}: {symptom.evidence}. {symptom.advice}"
                )


def tokens_of(metrics: Sequence[Mapping[str, Any]]) -> int:
    """Tokens generated in the steps of a `metrics` table; a second pass over a batch has none."""
    return int(sum(row.get(SAMPLED_TOKENS) or 0 for row in metrics))


class TokenBudget(BoundCallback):
    """Ends training, with a checkpoint, after the step that brings the tokens to `max_tokens`.

    Algorithms that sample differently much per step (dynamic sampling above all) are compared
    fairly at equal generated tokens, not at equal steps. Every completion counts, trained on or
    not.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.spent = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer, also when it continues from a checkpoint."""
        self.spent = tokens_of(state.log_history)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after the weights have changed, before the step is logged."""
        self.spent += int(sum(self.trainer._metrics["train"].get(SAMPLED_TOKENS, [])))
        if self.spent >= self.max_tokens:
            control.should_save = control.should_training_stop = True
