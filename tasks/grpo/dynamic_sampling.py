"""Dynamic sampling: groups without reward variance are replaced before the gradient step.

A group whose completions are all paid the same gives no gradient, and its share of the batch is
lost (DAPO, https://arxiv.org/abs/2503.14476, section 3.2). So the batch is sampled first, dead
groups are replaced by groups of other questions sampled from the same policy, and that again, up to
`max_rounds` times; what is still dead then stays in the batch. Nothing is hidden: what was sampled
and not trained on is in the rollouts table without an advantage, and its tokens are counted.

Which questions come in, and the seed they are sampled with, depend on the run's seed, the step and
the round alone, so a resumed run repeats them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tasks.grpo.rollout import Rollout

Inputs = list[dict[str, Any]]
Answer = tuple[Any, ...]
"""What TRL's `_generate` returns: prompt ids, completion ids, tool mask, completions, log-probs,
extra fields, images, tool images; per-completion lists or nothing."""


@dataclass(frozen=True)
class Draw:
    """Groups that were sampled together."""

    answer: Answer
    rollout: Rollout

    def groups(self, chosen: list[int]) -> Draw:
        """Only these groups."""
        size = self.rollout.scoring.group_size
        rows = [group * size + i for group in chosen for i in range(size)]
        return Draw(
            tuple(_rows_of(part, rows, len(self.rollout.inputs)) for part in self.answer),
            replace(
                self.rollout,
                inputs=[self.rollout.inputs[row] for row in rows],
                completions=[self.rollout.completions[row] for row in rows],
                completion_ids=[self.rollout.completion_ids[row] for row in rows],
                verdicts=[self.rollout.verdicts[row] for row in rows],
                rewards=self.rollout.rewards[rows],
            ),
        )

    def __add__(self, other: Draw) -> Draw:
        return Draw(
            tuple(_joined(a, b) for a, b in zip(self.answer, other.answer, strict=True)),
            replace(
                self.rollout,
                inputs=self.rollout.inputs + other.rollout.inputs,
                completions=self.rollout.completions + other.rollout.completions,
                completion_ids=self.rollout.completion_ids + other.rollout.completion_ids,
                verdicts=self.rollout.verdicts + other.rollout.verdicts,
                rewards=torch.cat([self.rollout.rewards, other.rollout.rewards]),
            ),
        )


def _rows_of(part: Any, rows: list[int], count: int) -> Any:
    """The chosen completions of a part of an answer; parts that aren't per completion stay."""
    return [part[row] for row in rows] if isinstance(part, list) and len(part) == count else part


def _joined(one: Any, other: Any) -> Any:
    return one + other if isinstance(one, list) else one


@dataclass(frozen=True)
class DynamicBatch:
    """A batch after its dead groups were replaced."""

    batch: Draw
    first: Rollout
    """The batch as it was sampled first: an unselected sample of what the policy does."""
    discarded: tuple[Rollout, ...]
    """What was replaced, by round."""
    num_rounds: int

    def figures(self) -> dict[str, float]:
        """What dynamic sampling cost and brought."""
        return {
            "refill_rounds": float(self.num_rounds),
            "refill_tokens": float(sum(rollout.num_tokens for rollout in self.discarded)),
            "first_live_share": float(self.first.live.float().mean()),
        }


def replace_dead_groups(
    first: Draw,
    sample: Callable[[Inputs, int], Draw],
    questions: Inputs,
    *,
    max_rounds: int,
    seed: str,
) -> DynamicBatch:
    """Replace the dead groups of `first`.

    `sample(inputs, round)` samples whole groups; `questions` are the rows of all RL questions.
    The live groups keep their order, those that came in follow.
    """
    used = {row["question_id"] for row in first.rollout.inputs}
    size = first.rollout.scoring.group_size
    batch, discarded, rounds = first, [], 0
    while rounds < max_rounds:
        live = batch.rollout.live.tolist()
        dead = [group for group, on in enumerate(live) if not on]
        unused = [row for row in questions if row["question_id"] not in used]
        chosen = random.Random(f"{seed}/{rounds}").sample(unused, min(len(dead), len(unused)))
        if not chosen:
            break
        rounds += 1
        used.update(row["question_id"] for row in chosen)
        fresh = sample([row for row in chosen for _ in range(size)], rounds)
        replaced = set(dead[: len(chosen)])
        discarded.append(batch.groups(sorted(replaced)).rollout)
        kept = [group for group in range(len(live)) if group not in replaced]
        batch = batch.groups(kept) + fresh
    return DynamicBatch(batch, first.rollout, tuple(discarded), rounds)
