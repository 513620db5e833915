"""The last look at a halted run: three log-probabilities of the same tokens, and what they say.

The sampler reads a few of the batch's completions (`prompt`), beside what it reported when it drew
them (`generated`) and what the trainer computed in train mode (`trainer`); the trainer reads them
once more in evaluation mode, which would show dropout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from trl import GRPOTrainer

from tasks.audit.diagnosis import Diagnosis, Gap, Gaps, diagnose

NUM_READ = 8
"""Completions that are read again."""
BATCH = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""What of a scored batch the model reads."""


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
    mask = scored["completion_mask"][:NUM_READ].bool()
    generated = scored["sampling_per_token_logps"][:NUM_READ][mask]
    trained = scored["old_per_token_logps"][:NUM_READ][mask]
    read = None
    if trainer.temperature == 1.0:  # the sampler reads at temperature 1 only
        read = _read_again(trainer, scored).to(trained.device)
    above = None if read is None else float((generated > read).float().mean())
    return diagnose(
        Gaps(
            limit,
            generated_trainer=_gap(generated, trained),
            prompt_trainer=None if read is None else _gap(read, trained),
            generated_prompt=None if read is None else _gap(generated, read),
            train_eval=_gap(_in_eval_mode(trainer, scored)[mask], trained),
            generated_above=above,
        )
    )


def _gap(one: torch.Tensor, other: torch.Tensor) -> Gap:
    difference = (one - other).abs().nan_to_num(0.0)
    return Gap(float(difference.mean()), float(difference.max()))


def _read_again(trainer: GRPOTrainer, scored: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the first completions' tokens, one after the other, as the sampler
    gives them when it reads them."""
    prompts, texts = [], []
    for row in range(min(NUM_READ, len(scored["prompt_ids"]))):
        prompts.append(scored["prompt_ids"][row][scored["prompt_mask"][row].bool()].tolist())
        texts.append(scored["completion_ids"][row][scored["completion_mask"][row].bool()].tolist())
    found = trainer.vllm_generation.score(
        [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    )
    values = [
        value
        for logprobs, text in zip(found, texts, strict=True)
        for value in logprobs[-len(text) :]
    ]
    return torch.tensor(values)


def _in_eval_mode(trainer: GRPOTrainer, scored: dict[str, Any]) -> torch.Tensor:
    """The trainer's log-probabilities of the first completions in evaluation mode."""
    batch = {name: scored[name][:NUM_READ] for name in BATCH}
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    model = trainer.model
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, batch["completion_ids"].size(1)
            )
    finally:
        model.train(training)
    return logps
