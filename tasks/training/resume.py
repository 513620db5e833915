"""Training checkpoints that a killed run can trust.

The Hugging Face trainer writes a checkpoint file by file, and no file says that all are there. So
a marker is written, last and synced to disk, and only marked checkpoints are resumed from. Old
checkpoints are removed here and not by the trainer: the marker goes first, so that what is left of
a half-removed one is never taken for a whole one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

PREFIX = "checkpoint-"
MARKER = "ratchet-complete"


def _marked(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = [path.parent for path in folder.glob(f"{PREFIX}*/{MARKER}")]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a trainer's output folder, if any."""
    return next(iter(reversed(_marked(folder))), None)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class CheckpointKeeper(TrainerCallback):
    """Marks each checkpoint once it is on disk and keeps the newest `keep` of them.

    The one of step `best()` is kept as well, if there is one. The trainer itself must not rotate:
    leave `save_total_limit` unset.
    """

    def __init__(self, keep: int = 2, best: Callable[[], int | None] = lambda: None) -> None:
        self.keep = keep
        self.best = best

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
        best = f"{PREFIX}{self.best()}"
        for old in [one for one in _marked(folder)[: -self.keep] if one.name != best]:
            (old / MARKER).unlink()
            shutil.rmtree(old)
