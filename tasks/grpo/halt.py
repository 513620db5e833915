"""What happens when the guard has found something: a line in the log, or the end of training.

Before it halts, the policy as it was before the doubtful batch is saved as a complete checkpoint,
and the sampler is asked once more: the log-probabilities it gives to the same tokens when it reads
them, beside those it gave when it sampled them and the trainer's, tell the likely cause by the
audit's rule (`tasks.audit.diagnosis`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate.utils import gather_object

from ratchet.config.run import GuardConfig
from ratchet.diagnostics.drift import ROUNDING, DriftError, Finding, Guard, Level
from ratchet.errors import UserError
from tasks.grpo.base_weights import changed, frozen_checksums
from tasks.sync.types import ServerError
from tasks.training.resume import MARKER, PREFIX, newest_checkpoint

if TYPE_CHECKING:
    from tasks.grpo.trainer import RolloutTrainer

FROZEN = "frozen_changed"
"""Figure of a finding about frozen weights."""
NUM_SHOWN = 3
"""Changed tensors that are named."""


@dataclass
class Oversight:
    """The guard over one training run, and what it does."""

    config: GuardConfig
    guard: Guard
    log: Callable[[str], None]
    base: dict[str, int] = field(default_factory=dict)
    """Checksums of the frozen weights at the start; empty when everything is trained."""

    def begin(self, trainer: RolloutTrainer) -> None:
        """Remember the frozen weights."""
        if self.config.base_every:
            self.base = frozen_checksums(trainer.model)

    def check_batch(
        self, trainer: RolloutTrainer, scored: dict[str, Any], figures: dict[str, float]
    ) -> None:
        """After sampling, before the batch is trained on; DriftError ends the training."""
        self._act(trainer, self.guard.check(figures), scored)

    def check_step(self, trainer: RolloutTrainer, surprise: tuple[float, float] | None) -> None:
        """After a step's gradients, before the weights change; DriftError ends the training."""
        findings = [] if surprise is None else self.guard.check_surprise(*surprise)
        step = trainer.state.global_step + 1
        if self.base and step % self.config.base_every == 0:
            findings += self._check_base(trainer)
        self._act(trainer, findings, None)

    def _check_base(self, trainer: RolloutTrainer) -> list[Finding]:
        # Every process has a copy; what one finds ends them all.
        mine = changed(self.base, frozen_checksums(trainer.model))
        names = list(dict.fromkeys(gather_object(mine)))
        if not names:
            return []
        shown = ", ".join(names[:NUM_SHOWN]) + (" …" if len(names) > NUM_SHOWN else "")
        words = f"{len(names)} of {len(self.base)} frozen tensors have changed ({shown})"
        return [Finding(Level.HALT, FROZEN, words)]

    def _act(
        self, trainer: RolloutTrainer, findings: list[Finding], scored: dict[str, Any] | None
    ) -> None:
        step = trainer.state.global_step + 1
        if halting := self.guard.act(step, findings, self.log):
            self._halt(trainer, step, halting, scored)

    def _halt(
        self,
        trainer: RolloutTrainer,
        step: int,
        findings: list[Finding],
        scored: dict[str, Any] | None,
    ) -> NoReturn:
        seen = "; ".join(finding.words for finding in findings)
        cause = self._cause(trainer, findings, scored)
        # The launcher ends all processes soon after the first error: none comes before the cause.
        trainer.accelerator.wait_for_everyone()
        saved = save_checkpoint(trainer)
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
        self, trainer: RolloutTrainer, findings: list[Finding], scored: dict[str, Any] | None
    ) -> str:
        """What is likely wrong, in a sentence or two."""
        if any(finding.figure == FROZEN for finding in findings):
            return (
                "Something writes to weights that aren't trained: a merge and unmerge in place, or "
                "an optimizer or hook that was given too much."
            )
        if not trainer.accelerator.is_main_process:
            return ""  # the first process asks the sampler, and tells
        from tasks.grpo.diagnose_drift import look

        rounding = ROUNDING[self.guard.dtype][1]
        return f"Probable cause: {look(trainer, scored, self.guard.surprise, rounding).words}"


def lost_sampler(trainer: RolloutTrainer, error: ServerError) -> UserError:
    """What to tell when the server failed; the policy is saved first, where it is that of a step
    that is written down whole."""
    step, logged = trainer.state.global_step, len(trainer.records.metrics())
    if trainer.accelerator.num_processes == 1 and logged == step:
        save_checkpoint(trainer)
    newest = newest_checkpoint(Path(trainer.args.output_dir))
    kept = "nothing was trained yet" if newest is None else f"{newest.name} is saved"
    what, _, log = str(error).partition("\n")
    return UserError(
        f"{what} in step {step + 1} of GRPO, {log.partition(':')[0]}: {kept}, and the same command "
        "goes on from there"
    )


def save_checkpoint(trainer: RolloutTrainer) -> Path | None:
    """Save the policy as it is as a complete checkpoint; None before the first step."""
    step = trainer.state.global_step
    if step == 0:
        return None
    folder = Path(trainer.args.output_dir) / f"{PREFIX}{step}"
    if not (folder / MARKER).exists():
        trainer.optimizer.zero_grad()
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    return folder
