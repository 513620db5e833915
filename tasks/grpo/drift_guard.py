"""The drift guard in a GRPO run: what is checked when, and what happens when it has found
something, a line in the log or the end of training.

Before it halts, the policy as it was before the doubtful batch is saved as a complete checkpoint,
and `tasks.grpo.diagnose_drift` looks for the likely cause.

Weights that a LoRA run doesn't train are held against what they were. A merge and unmerge in place,
an optimizer that was given too much, a hook that writes: each leaves the base a little changed, and
every later step trains another model than the one that is saved beside the adapter. A checksum over
the bits of each tensor notices a change of one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl import GRPOTrainer

from ratchet.config.run import GuardConfig
from ratchet.diagnostics.drift import ROUNDING, DriftError, Finding, Guard, Level
from tasks.grpo.diagnose_drift import diagnose_drift
from tasks.training.resume import save_now

FROZEN = "frozen_changed"
"""Figure of a finding about frozen weights."""
NUM_SHOWN = 3
"""Changed tensors that are named."""


def base_weight_checksums(model: torch.nn.Module) -> dict[str, int]:
    """Checksum of every parameter that isn't trained, by name."""
    return {
        name: int(torch.hash_tensor(parameter.detach()).item())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def changed(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Names of the parameters whose bits differ, in the model's order."""
    return [name for name, value in before.items() if after[name] != value]


@dataclass
class DriftGuardCallback(TrainerCallback):
    """The guard over one training run, and what it does. `check_batch` and `check_step` are called
    by the trainer, at places where there is no callback."""

    config: GuardConfig
    guard: Guard
    log: Callable[[str], None]
    base: dict[str, int] = field(default_factory=dict)
    """Checksums of the frozen weights at the start; empty when everything is trained."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any
    ) -> None:
        """Called by the trainer, also when it continues: remember the frozen weights."""
        if self.config.base_every:
            self.base = base_weight_checksums(model)

    def check_batch(
        self, trainer: GRPOTrainer, scored: dict[str, Any], figures: dict[str, float]
    ) -> None:
        """After sampling, before the batch is trained on; DriftError ends the training."""
        self._act(trainer, self.guard.check(figures), scored)

    def check_step(self, trainer: GRPOTrainer, surprise: tuple[float, float] | None) -> None:
        """After a step's gradients, before the weights change; DriftError ends the training."""
        findings = [] if surprise is None else self.guard.check_surprise(*surprise)
        step = trainer.state.global_step + 1
        if self.base and step % self.config.base_every == 0:
            findings += self._check_base(trainer)
        self._act(trainer, findings, None)

    def _check_base(self, trainer: GRPOTrainer) -> list[Finding]:
        # Every process has a copy; what one finds ends them all.
        mine = changed(self.base, base_weight_checksums(trainer.model))
        names = list(dict.fromkeys(gather_object(mine)))
        if not names:
            return []
        shown = ", ".join(names[:NUM_SHOWN]) + (" …" if len(names) > NUM_SHOWN else "")
        words = f"{len(names)} of {len(self.base)} frozen tensors have changed ({shown})"
        return [Finding(Level.HALT, FROZEN, words)]

    def _act(
        self, trainer: GRPOTrainer, findings: list[Finding], scored: dict[str, Any] | None
    ) -> None:
        step = trainer.state.global_step + 1
        if halting := self.guard.act(step, findings, self.log):
            self._halt(trainer, step, halting, scored)

    def _halt(
        self,
        trainer: GRPOTrainer,
        step: int,
        findings: list[Finding],
        scored: dict[str, Any] | None,
    ) -> NoReturn:
        seen = "; ".join(finding.words for finding in findings)
        cause = self._cause(trainer, findings, scored)
        # The launcher ends all processes soon after the first error: none comes before the cause.
        trainer.accelerator.wait_for_everyone()
        saved = save_now(trainer)
        kept = (
            "nothing was trained yet"
            if saved is None
            else f"the policy before it is saved ({saved.name})"
        )
        raise DriftError(
            f"halted at step {step}, before its batch was trained on: {seen}. {cause} "
            f"{kept[0].upper() + kept[1:]}; `ratchet audit-sync` examines the pair, and the same "
            "run with --set guard.halt=false goes on from here"
        )

    def _cause(
        self, trainer: GRPOTrainer, findings: list[Finding], scored: dict[str, Any] | None
    ) -> str:
        """What is likely wrong, in a sentence or two."""
        if any(finding.figure == FROZEN for finding in findings):
            return (
                "Something writes to weights that aren't trained: a merge and unmerge in place, or "
                "an optimizer or hook that was given too much."
            )
        if not trainer.accelerator.is_main_process:
            return ""  # the first process asks the sampler, and tells
        rounding = ROUNDING[self.guard.dtype][1]
        found = diagnose_drift(trainer, scored, self.guard.surprise, rounding)
        return f"Probable cause: {found.words}"
