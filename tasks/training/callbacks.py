"""Callbacks of every trainer: what a person is told after each step, and those that reach back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from tasks.runtime.context import StageContext


class BoundCallback(TrainerCallback):
    """One that reaches back to its trainer, which the training loop hands to it."""

    trainer: Any = None


class ProgressCallback(TrainerCallback):
    """Tells how far training is, and the newest figures."""

    def __init__(self, ctx: StageContext) -> None:
        self.ctx = ctx

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Called by the trainer after every step, and once at the end."""
        if "loss" in logs:
            self.ctx.progress(state.global_step, state.max_steps, "steps", self.note(logs))

    def note(self, logs: Mapping[str, Any]) -> str:
        """The figures, for people."""
        return f"loss {logs['loss']:.4f}, gradient norm {logs['grad_norm']:.2f}"
