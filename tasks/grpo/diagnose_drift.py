"""The last look at a halted run: three log-probabilities of the same tokens, and what they say.

The sampler reads a few of the batch's completions, beside what it reported when it drew them, and
the trainer scores them in train and in evaluation mode, which would show dropout. How that is
measured and what follows from it is the audit's (`tasks.audit.logprobs`, `tasks.audit.diagnosis`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trl import GRPOTrainer

from tasks.audit.diagnosis import Diagnosis, Gap, Gaps, diagnose

NUM_READ = 8
"""Completions that are read again."""


def diagnose_drift(
    trainer: GRPOTrainer,
    scored: dict[str, Any] | None,
    surprise: tuple[float, float] | None,
    rounding: float,
) -> Diagnosis:
    """The likely cause; `scored` is the batch, None where only the surprise was out of bounds."""
    limit = Gap(rounding, math.inf)
    if scored is None:
        return diagnose(Gaps(limit, surprise=surprise))
    from tasks.audit.logprobs import gap, measure
    from tasks.sync.types import Sampled

    sampled = [
        Sampled(prompt[is_prompt].tolist(), ids[is_text].tolist(), logps[is_text].tolist(), None)
        for prompt, is_prompt, ids, is_text, logps in zip(
            scored["prompt_ids"][:NUM_READ],
            scored["prompt_mask"][:NUM_READ].bool(),
            scored["completion_ids"][:NUM_READ],
            scored["completion_mask"][:NUM_READ].bool(),
            scored["sampling_per_token_logps"][:NUM_READ],
            strict=True,
        )
    ]
    gaps = measure(
        trainer,
        sampled,
        trainer.temperature,
        limit,
        batch_size=1,
        in_evaluation=True,
    )
    trained = [
        logps[is_text].tolist()
        for logps, is_text in zip(
            scored["old_per_token_logps"][:NUM_READ],
            scored["completion_mask"][:NUM_READ].bool(),
            strict=True,
        )
    ]
    # What the guard has seen: a fault of that one pass doesn't show when the tokens are read again.
    in_batch = gap([one.logprobs for one in sampled], trained)
    # Too few tokens to say anything of how they were drawn.
    return diagnose(replace(gaps, generated_trainer=in_batch, surprise=None))
