"""P3 and P4: three log-probabilities of the same tokens, and what the prefix cache gave.

The prompts share a beginning that is longer than a block of the prefix cache and was read by the
version before, so a cache that outlives a sync is used, and shows. The trainer's log-probabilities
are TRL's own, in train mode, over batches padded as training pads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasks.audit.diagnosis import CHANCE, Cause, Finding, Gap, Gaps, Probe
from tasks.audit.rows import Report, Row
from tasks.sync.types import Sampled

Lists = list[list[float]]


@dataclass(frozen=True)
class Scored:
    """What the trainer says of sampled tokens; a list per completion."""

    logprobs: Lists
    entropies: Lists


@torch.no_grad()
def trainer_scores(
    trainer: Any, sampled: Sequence[Sampled], temperature: float, *, train: bool, batch_size: int
) -> Scored:
    """The trainer's log-probabilities and entropies of the sampled tokens at `temperature`, in
    train or evaluation mode. At the run's own temperature they are computed by TRL."""
    ids, mask, width = padded(sampled)
    device = trainer.accelerator.device
    was_training = trainer.model.training
    trainer.model.train(train)
    try:
        if temperature == trainer.temperature:
            found = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                ids.to(device),
                mask.to(device),
                width,
                batch_size=batch_size,
                compute_entropy=True,
            )[:2]
        else:
            with trainer.accelerator.autocast():
                found = plain_scores(trainer.model, ids, mask, width, temperature, batch_size)
    finally:
        trainer.model.train(was_training)
    return Scored(*(as_lists(values, sampled) for values in found))


@torch.no_grad()
def plain_scores(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    width: int,
    temperature: float,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the last `width` tokens from the model's own logits, each
    of shape (completions, width)."""
    device = next(model.parameters()).device
    logprobs, entropies = [], []
    for start in range(0, len(ids), batch_size):
        rows = ids[start : start + batch_size].to(device)
        out = model(input_ids=rows, attention_mask=mask[start : start + batch_size].to(device))
        every = (out.logits[:, -width - 1 : -1].double() / temperature).log_softmax(dim=-1)
        logprobs.append(every.gather(2, rows[:, -width:, None])[..., 0].cpu())
        entropies.append(-(every.exp() * every).sum(dim=-1).cpu())
    return torch.cat(logprobs), torch.cat(entropies)


def padded(sampled: Sequence[Sampled]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids and mask, shape (completions, prompt + completion), prompts padded on the left and
    completions on the right; and how many columns are the completions'."""
    longest = max(len(one.prompt_ids) for one in sampled)
    width = max(len(one.token_ids) for one in sampled)
    ids = torch.zeros(len(sampled), longest + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(sampled):
        start, end = longest - len(one.prompt_ids), longest + len(one.token_ids)
        ids[row, start:end] = torch.tensor([*one.prompt_ids, *one.token_ids])
        mask[row, start:end] = 1
    return ids, mask, width


def as_lists(values: torch.Tensor, sampled: Sequence[Sampled]) -> Lists:
    """A list per completion out of a tensor (completions, width)."""
    lists = values.cpu().tolist()
    return [row[: len(one.token_ids)] for row, one in zip(lists, sampled, strict=True)]


def gap(a: Lists, b: Lists) -> Gap:
    """How far two lists of log-probabilities are apart; infinite where one isn't a number."""
    differences = [
        abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    ]
    return Gap(sum(differences) / len(differences), max(differences))


def surprise(scored: Scored) -> tuple[float, float]:
    """Mean of log p + entropy over the sampled tokens and its standard error. Given what came
    before it each term averages to 0 if the token was drawn from the trainer's distribution, so
    the terms are uncorrelated, whatever the text."""
    terms = [
        logprob + entropy
        for row, more in zip(scored.logprobs, scored.entropies, strict=True)
        for logprob, entropy in zip(row, more, strict=True)
    ]
    mean = sum(terms) / len(terms)
    variance = sum((term - mean) ** 2 for term in terms) / max(1, len(terms) - 1)
    return mean, math.sqrt(variance / len(terms))


def measure(
    trainer: Any,
    sampled: Sequence[Sampled],
    temperature: float,
    limit: Gap,
    *,
    batch_size: int,
    in_evaluation: bool,
) -> Gaps:
    """The gaps between what sampler and trainer say of `sampled`, drawn at `temperature`. The
    sampler reads prompts at temperature 1 only, so at another that part stays unknown, as does the
    trainer in evaluation mode where that isn't asked for."""

    def scores(train: bool) -> Scored:
        return trainer_scores(trainer, sampled, temperature, train=train, batch_size=batch_size)

    in_training = scores(True)
    generated = [one.logprobs for one in sampled]
    known: dict[str, Any] = {
        "generated_trainer": gap(generated, in_training.logprobs),
        "surprise": surprise(in_training),
    }
    if temperature == 1:
        whole = trainer.vllm_generation.score(
            [[*one.prompt_ids, *one.token_ids] for one in sampled]
        )
        read = [row[-len(one.token_ids) :] for row, one in zip(whole, sampled, strict=True)]
        known |= {
            "prompt_trainer": gap(read, in_training.logprobs),
            "generated_prompt": gap(generated, read),
            "generated_above": _share_above(generated, read),
        }
    if in_evaluation:
        known["train_eval"] = gap(in_training.logprobs, scores(False).logprobs)
    return Gaps(limit, **known)


def _share_above(a: Lists, b: Lists) -> float:
    pairs = [
        (x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    ]
    return sum(x > y for x, y in pairs) / len(pairs)


PAIRS = {
    "generated against trainer": "generated_trainer",
    "read against trainer": "prompt_trainer",
    "generated against read": "generated_prompt",
    "train mode against evaluation mode": "train_eval",
}


def logprob_rows(sync: int, gaps: Gaps, num_tokens: int, temperature: float) -> list[Row]:
    """Two rows for each pair that was measured, the mean and the largest difference, and one for
    the draws."""
    at = "" if temperature == 1 else f", temperature {temperature:g}"
    rows = []
    for check, name in PAIRS.items():
        found: Gap | None = getattr(gaps, name)
        if found is None:
            continue
        for group in ("mean", "max"):
            value, limit = getattr(found, group), getattr(gaps.limit, group)
            ok = value <= limit
            rows.append(
                Row(sync, Probe.LOGPROBS, check + at, group, num_tokens, value, limit, ok, "")
            )
    assert gaps.surprise is not None
    mean, error = gaps.surprise
    distance = abs(mean) / error if error else 0.0
    rows.append(
        Row(
            sync,
            Probe.LOGPROBS,
            "draws against trainer" + at,
            "standard errors",
            num_tokens,
            distance,
            CHANCE,
            distance <= CHANCE,
            f"{mean:+.3f} ± {error:.3f}",
        )
    )
    return rows


def check_cache(sync: int, before: Sequence[Sampled], after: Sequence[Sampled]) -> Report:
    """P4: the first completion after a sync has read nothing out of the prefix cache, though the
    prompts' beginning was in it (`before`: the completions of the version before)."""
    hits = [one.num_cached_tokens for one in before]
    first = after[0].num_cached_tokens
    if first is None or any(hit is None for hit in hits):
        return Report()  # the sampler doesn't tell; P3 has to show it
    warmed = max(hit or 0 for hit in hits)
    seen = (
        f"{warmed} tokens were cached before"
        if warmed
        else "not tested: nothing was cached before (the prompts are shorter than a cache block)"
    )
    check = "cached tokens after the sync"
    row = Row(sync, Probe.CACHE, check, "", 1, float(first), 0.0, first == 0, seen)
    words = (
        f"the first completion after the sync read {first} prompt tokens' keys and values out of "
        "the prefix cache, which an older version had computed"
    )
    return Report([row], [Finding(Probe.CACHE, Cause.STALE_CACHE, words)] if first else [])
