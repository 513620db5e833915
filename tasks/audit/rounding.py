"""How far two right implementations of one model may be apart: measured, not assumed.

It depends on the model: large attention logits, as key biases make them, turn a bfloat16 step into
hundredths of a nat. So the trainer computes the log-probabilities of the audit's tokens once more,
in a wider format. Its own distance from that is the rounding of one side; the sampler's is of the
same size, and the two may point opposite ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tasks.audit.diagnosis import Gap
from tasks.audit.logprobs import as_lists, gap, padded, plain_scores, trainer_scores
from tasks.sync.types import Sampled

FLOOR = {"float32": Gap(5e-5, 5e-3), "bfloat16": Gap(1e-2, 0.5)}
"""Differences that are never reported, in nats per token. Between vLLM and transformers 1e-6 to
1e-5 is usual in float32 and 5e-3 in bfloat16; the smallest fault of interest, one small layer stale
in an update of 1/20, is at 1e-3 and more, and P2 sees it at any size."""
GPU_FLOOR = {"float32": Gap(2e-3, 0.2), "bfloat16": FLOOR["bfloat16"]}
"""On a GPU an attention kernel may multiply float32 in TF32, whose step is 2^-11."""
ROOM = Gap(6.0, 15.0)
"""Multiples of the trainer's own rounding that are allowed: 2 for both sides pointing opposite
ways, and 3 for a kernel that rounds oftener; more for the maximum, which is one token's."""


def limit_of(found: Gap, dtype: str, *, on_gpu: bool) -> Gap:
    """What rounding explains, from the trainer's own rounding."""
    floor = (GPU_FLOOR if on_gpu else FLOOR)[dtype]
    if not (math.isfinite(found.mean) and math.isfinite(found.max)):
        return floor
    return Gap(max(floor.mean, ROOM.mean * found.mean), max(floor.max, ROOM.max * found.max))


def rounding(trainer: Any, sampled: Sequence[Sampled], dtype: str, *, batch_size: int) -> Gap:
    """How far the trainer's log-probabilities, in `dtype`, are from those of the same weights in a
    wider format (float64 for float32, float32 for bfloat16)."""
    model = trainer.model
    own = trainer_scores(trainer, sampled, 1.0, train=False, batch_size=batch_size).logprobs
    was_training = model.training
    model.eval()
    with _widened(model, torch.float64 if dtype == "float32" else torch.float32):
        exact, _ = plain_scores(model, *padded(sampled), 1.0, batch_size)
    model.train(was_training)
    return gap(own, as_lists(exact, sampled))


@contextmanager
def _widened(model: torch.nn.Module, wide: torch.dtype) -> Iterator[None]:
    """The model in a wider number format while it lasts. There and back changes no bit."""
    tensors = [
        tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()
    ]
    before = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(wide)
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(dtype)
