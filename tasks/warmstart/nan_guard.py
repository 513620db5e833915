"""Stops a warm-start at its first non-finite loss or gradient, and keeps what shows why.

A trainer would go on: clipping by a NaN norm turns every gradient into NaN, and one optimizer step
later so are all weights. Here the micro-batches of the step are held until its gradient norm is
known. If that isn't finite, they are saved with the weights they met (the optimizer has not
stepped yet), and the run ends with an error that names step, questions, attention and dtype.

The replay folder holds `batch.safetensors` (tensors `<micro-batch>.<name>`; what ran under the
header key `ratchet`, as JSON) and `model/` (weights, or base path and adapter, as trained).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import Trainer

from ratchet.errors import UserError

EXAMPLE = "example"
"""Batch column with the index of each row's example; taken out before the model sees the batch."""


@dataclass(frozen=True)
class Setting:
    """What a replay has to know besides the batch."""

    method: Literal["sft", "opd"]
    attention: str
    dtype: str
    """'bfloat16' means autocast over float32 weights."""
    model: str
    """Where the model came from."""
    teacher: str | None = None
    teacher_revision: str | None = None
    beta: float | None = None
    """Of distillation: 1 is the reverse KL divergence, 0 the forward one."""
    temperature: float | None = None
    """Of distillation."""


@dataclass
class NanGuard:
    """Watches one training run."""

    setting: Setting
    question_ids: Sequence[str]
    """Question of each example, by example index."""
    folder: Path
    """The replay folder is made in here."""
    _batches: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def see(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Remember a micro-batch; returns it without the example indices."""
        self._batches.append(
            {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        )
        return {name: value for name, value in batch.items() if name != EXAMPLE}

    def check_loss(self, loss: torch.Tensor, step: int, model: Any) -> None:
        """UserError when the loss of the last micro-batch isn't finite."""
        if not math.isfinite(value := loss.item()):
            self._stop("loss", value, step, model, self._batches[-1:])

    def check_gradient(self, norm: float | torch.Tensor, step: int, model: Any) -> None:
        """UserError when the step's gradient norm isn't finite; otherwise forget its batches."""
        if not math.isfinite(float(norm)):
            self._stop("gradient norm", float(norm), step, model, self._batches)
        self._batches.clear()

    def _stop(
        self,
        what: str,
        value: float,
        step: int,
        model: Any,
        batches: list[dict[str, torch.Tensor]],
    ) -> None:
        found = [[self.question_ids[i] for i in batch[EXAMPLE].tolist()] for batch in batches]
        folder = self.folder / f"replay-step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{index}.{name}": value.detach().cpu().clone()
            for index, batch in enumerate(batches)
            for name, value in batch.items()
        }
        about = asdict(self.setting) | {"step": step, "what": what, "question_ids": found}
        save_file(tensors, folder / "batch.safetensors", metadata={"ratchet": json.dumps(about)})
        model.save_pretrained(folder / "model")
        setting = self.setting
        raise UserError(
            f"{what} is {value} at step {step} of {setting.method} (attention "
            f"{setting.attention}, {setting.dtype}); questions "
            f"{', '.join(question for ids in found for question in ids)}. Batch and weights are "
            f"in {folder}. {self._advice()}"
        )

    def _advice(self) -> str:
        if self.setting.attention != "eager":
            return f"Try {self.setting.method}.attention = 'eager'."
        if self.setting.dtype != "float32":
            return "Try model.dtype = 'float32'."
        return f"Try a lower {self.setting.method}.learning_rate."


class Guarded(Trainer):
    """What a trainer under a `NanGuard` does beside its own; comes first among its bases."""

    guard: NanGuard

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Loss of one micro-batch; the example indices stay with the guard."""
        loss = super().compute_loss(model, self.guard.see(inputs), *args, **kwargs)
        self.guard.check_loss(loss, self.state.global_step + 1, self.model)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.guard.check_gradient(norm, self.state.global_step + 1, self.model)
        return norm
