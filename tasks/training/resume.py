"""Training that a kill can't spoil: checkpoints that are whole, and the loop that goes on from the
newest.

The Hugging Face trainer writes a checkpoint file by file, and no file says that all are there. So
a marker is written, last and synced to disk, and only marked checkpoints are resumed from. Old
checkpoints are removed here and not by the trainer: the marker goes first, so that what is left of
a half-removed one is never taken for a whole one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerState

from tasks.training.callbacks import BoundCallback
from tasks.training.dev_check import best_step

PREFIX = "checkpoint-"
MARKER = "ratchet-complete"


def _marked(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted((path.parent for path in folder.glob(f"{PREFIX}*/{MARKER}")), key=step_of)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a trainer's output folder, if any."""
    return next(iter(reversed(_marked(folder))), None)


def step_of(checkpoint: Path | None) -> int:
    """Optimizer steps that a checkpoint has seen."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix(PREFIX))


def train_from_newest_checkpoint(
    trainer: Any,
    log: Callable[[str], None],
    ended: Callable[[Sequence[Mapping[str, Any]]], bool],
) -> None:
    """Train to the end, from the newest complete checkpoint if there is one. `ended` says of the
    rows that a killed run logged whether that was all of its training."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, BoundCallback):
            callback.trainer = trainer
    start = newest_checkpoint(Path(trainer.args.output_dir))
    if start is None:
        trainer.train()
        return
    log(f"continuing from {start.name}")
    past = TrainerState.load_from_json(str(start / "trainer_state.json"))
    if ended(past.log_history):
        trainer.state = past
        trainer._load_from_checkpoint(str(start))
        return
    trainer.train(resume_from_checkpoint=str(start))


def save_now(trainer: Any) -> Path | None:
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


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class CheckpointKeeper(TrainerCallback):
    """Marks each checkpoint once it is on disk and keeps the newest `keep` of them, and the one
    that did best on dev questions. The trainer itself must not rotate: leave `save_total_limit`
    unset."""

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after it has written a checkpoint, in every process that trains;
        none goes on before the mark is there."""
        everyone = PartialState()
        everyone.wait_for_everyone()
        if everyone.is_main_process:
            self._mark(Path(args.output_dir), state)
        everyone.wait_for_everyone()

    def _mark(self, folder: Path, state: Any) -> None:
        new = folder / f"{PREFIX}{state.global_step}"
        _sync_tree(new)
        (new / MARKER).write_text("")
        _sync_tree(new)
        best = best_step(state.log_history)
        for old in [one for one in _marked(folder)[: -self.keep] if step_of(one) != best]:
            (old / MARKER).unlink()
            shutil.rmtree(old)
