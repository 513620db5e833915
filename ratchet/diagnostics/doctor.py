"""The flat-reward doctor: what holds a GRPO run back, with the evidence.

A reward that doesn't rise has a handful of usual causes, and each leaves its trace in the metrics
and rollouts. Every rule looks for one of them in the most recent steps and, where it finds it, says
what it saw and what to change. `ratchet doctor RUN` asks all of them; training asks now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean, median
from typing import Any

from ratchet.config.run import Dtype, GrpoConfig, GuardConfig
from ratchet.diagnostics.drift import healthy_drift
from ratchet.prompts import answer_start
from ratchet.verifier import Style
from ratchet.verifier.answer_places import WORDS, Place, elsewhere

Row = Mapping[str, Any]

RECENT_SHARE = 1 / 3
"""Share of the steps, from the end, that count as recent."""
MIN_STEPS = 5
"""Fewest steps that anything is said about."""
CLIPPED_STEPS = 0.9
FEW_LIVE = 0.25
CUT_OFF = 0.1
UNREADABLE = 0.2
MISPLACED = 0.2
DOMINANT = 0.8
SMALL_LORA_RATE = 1e-5
COLLAPSED = 0.1
SOLVED = 0.9
RIGHT = 0.05

CORRECTNESS = frozenset(
    {"exact_check", "correctness_check", "lenient_correctness_check", "boxed_correctness"}
)
"""Rewards that may well decide alone."""
MLP_MODULES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc")


class Diagnosis(StrEnum):
    """What can hold a run back."""

    DRIFT = "drift"
    DROPOUT = "dropout"
    NO_LIVE_GROUPS = "no live groups"
    NEVER_RIGHT = "hardly ever right"
    SMALL_RATE = "learning rate too small"
    CLIPPED = "gradients clipped"
    FEW_MODULES = "LoRA on too few modules"
    TRUNCATED = "truncation"
    UNREADABLE = "parse failures"
    MISPLACED = "answer in the wrong place"
    DOMINATED = "one reward dominates"
    COLLAPSED = "entropy collapse"


@dataclass(frozen=True)
class Finding:
    """A diagnosis, and what it is made from."""

    diagnosis: Diagnosis
    seen: str
    """What was seen, with figures; a clause without a full stop."""
    advice: str
    """What to change; a sentence."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a training run."""

    metrics: Sequence[Row]
    """Rows of the `metrics` table, in order of steps."""
    rollouts: Sequence[Row]
    """Rows of the `rollouts` table of recent steps."""
    grpo: GrpoConfig
    guard: GuardConfig
    dtype: Dtype
    style: Style
    max_completion_tokens: int
    weights: Mapping[str, float]
    """Weight of each reward."""
    adapter: Mapping[str, Any] | None
    """The adapter's configuration as PEFT writes it, where it is there."""

    @property
    def recent(self) -> Sequence[Row]:
        """Metrics of the recent steps."""
        return self.metrics[-max(MIN_STEPS, math.ceil(len(self.metrics) * RECENT_SHARE)) :]

    def values(self, name: str, rows: Iterable[Row] | None = None) -> list[float]:
        """A figure over steps (recent ones by default) that logged it."""
        chosen = self.recent if rows is None else rows
        return [row[name] for row in chosen if row.get(name) is not None]

    def level(self, name: str) -> float:
        """Mean of a figure over recent steps; 0 where it isn't logged."""
        found = self.values(name)
        return mean(found) if found else 0.0

    def trend(self, name: str = "reward", rows: Sequence[Row] | None = None) -> Trend:
        """How a figure moved from the first to the last third of `rows` (all by default)."""
        found = self.values(name, self.metrics if rows is None else rows)
        third = max(2, len(found) // 3)
        return Trend(found[:third], found[-third:])


@dataclass(frozen=True)
class Trend:
    """Values of the first and of the last third of some steps."""

    early: list[float]
    late: list[float]

    @property
    def rose(self) -> bool:
        """Whether the later mean is above the earlier one by two standard errors."""
        return self.late_mean - self.early_mean > 2 * self.error

    @property
    def early_mean(self) -> float:
        """Mean of the first third."""
        return mean(self.early)

    @property
    def late_mean(self) -> float:
        """Mean of the last third."""
        return mean(self.late)

    @property
    def error(self) -> float:
        """Standard error of the difference of the means."""
        return math.sqrt(sum(_variance(part) / len(part) for part in (self.early, self.late)))

    @property
    def words(self) -> str:
        """'1.42 → 1.45 (± 0.03)'."""
        return f"{self.early_mean:.2f} → {self.late_mean:.2f} (± {self.error:.2f})"


def _variance(values: Sequence[float]) -> float:
    middle = mean(values)
    return sum((value - middle) ** 2 for value in values) / max(1, len(values) - 1)


def _drift(evidence: Evidence) -> Finding | None:
    every = evidence.values("drift_mean", evidence.metrics)
    if not every:
        return None
    limit = evidence.guard.warn_drift * healthy_drift(every[0], evidence.dtype)
    worst, dropped = max(evidence.values("drift_mean")), evidence.level("dropped_share")
    if worst <= limit and dropped <= evidence.guard.warn_dropped:
        return None
    seen = (
        f"drift of up to {worst:.1e} nats per token (expected below {limit:.1e}) and {dropped:.0%} "
        "of the completions dropped for it"
    )
    return Finding(
        Diagnosis.DRIFT, seen, "Find out why sampler and trainer differ: `ratchet audit-sync`."
    )


def _dropout(evidence: Evidence) -> Finding | None:
    dropout = 0.0 if evidence.adapter is None else evidence.adapter["lora_dropout"]
    if not dropout:
        return None
    return Finding(
        Diagnosis.DROPOUT,
        f"the adapter was trained with dropout {dropout:g}, which the sampler doesn't have",
        "Train it with lora_dropout = 0.",
    )


def _few_modules(evidence: Evidence) -> Finding | None:
    targets = None if evidence.adapter is None else evidence.adapter["target_modules"]
    if targets is None or isinstance(targets, str):  # 'all-linear', or a pattern
        return None
    names = {target.rpartition(".")[2] for target in targets}
    if names.intersection(MLP_MODULES):
        return None
    return Finding(
        Diagnosis.FEW_MODULES,
        f"LoRA adapts only {', '.join(sorted(names))}",
        "Adapt every linear layer (target_modules = 'all-linear'): attention alone learns less.",
    )


def _groups(evidence: Evidence) -> list[list[Row]]:
    """The rollouts' groups."""
    found: dict[tuple[int, str], list[Row]] = {}
    for row in evidence.rollouts:
        found.setdefault((row["step"], row["question_id"]), []).append(row)
    return list(found.values())


def _no_live_groups(evidence: Evidence) -> Finding | None:
    live = evidence.level("live_share")
    if live >= FEW_LIVE or evidence.level("strict") >= SOLVED:
        return None
    groups = _groups(evidence)
    wrong = sum(not any(row["lenient"] for row in group) for group in groups)
    right = sum(all(row["strict"] for row in group) for group in groups)
    seen = (
        f"only {live:.0%} of the groups have rewards that differ; of the last {len(groups)} groups "
        f"{wrong} are all wrong and {right} all right"
    )
    if wrong >= right:
        advice = "Give it easier questions (filter.keep_above) or more warm-up first."
    else:
        advice = "Give it harder questions (filter.keep_below), or stop: there is little to gain."
    return Finding(Diagnosis.NO_LIVE_GROUPS, seen, advice)


def _never_right(evidence: Evidence) -> Finding | None:
    share = evidence.level("lenient")
    if share >= RIGHT:
        return None
    paid = reward_shares(evidence)
    seen = f"only {share:.1%} of the completions are right, wherever the answer stands"
    if paid:
        name, part = max(paid.items(), key=lambda item: item[1])
        seen += f"; what tells completions apart is mostly '{name}' ({part:.0%})"
    return Finding(
        Diagnosis.NEVER_RIGHT,
        seen,
        "RL sharpens what is there: warm up more (SFT, OPD), or take easier questions.",
    )


def _small_rate(evidence: Evidence) -> Finding | None:
    rate = evidence.grpo.learning_rate
    trend = evidence.trend()
    if not evidence.grpo.lora.enabled or rate >= SMALL_LORA_RATE or trend.rose:
        return None
    return Finding(
        Diagnosis.SMALL_RATE,
        f"LoRA with a learning rate of {rate:g}, and the reward hasn't moved: {trend.words}",
        "Set grpo.learning_rate = 3e-5 or more: 5e-6 is a rate for full fine-tuning.",
    )


def _clipped(evidence: Evidence) -> Finding | None:
    norms = evidence.values("grad_norm")
    limit = evidence.grpo.max_grad_norm
    clipped = sum(norm > limit for norm in norms)
    if clipped < CLIPPED_STEPS * len(norms):
        return None
    seen = (
        f"the gradient was clipped on {clipped} of the last {len(norms)} steps; its median norm is "
        f"{median(norms):.2g} where {limit:g} is allowed"
    )
    return Finding(Diagnosis.CLIPPED, seen, f"Set grpo.max_grad_norm near {2 * median(norms):.1g}.")


def _truncated(evidence: Evidence) -> Finding | None:
    share = evidence.level("truncated_share")
    if share <= CUT_OFF:
        return None
    return Finding(
        Diagnosis.TRUNCATED,
        f"{share:.0%} of the completions are cut off at {evidence.max_completion_tokens} tokens",
        "Raise sampler.max_completion_tokens, or warm the model up on shorter solutions.",
    )


def _unreadable(evidence: Evidence) -> Finding | None:
    share = evidence.level("status/parse_failure")
    if share <= UNREADABLE:
        return None
    return Finding(
        Diagnosis.UNREADABLE,
        f"no answer can be read in {share:.0%} of the completions",
        "Choose the prompt format that the benchmark found best, or warm up on the format (SFT).",
    )


def _misplaced(evidence: Evidence) -> Finding | None:
    gap = evidence.level("lenient") - evidence.level("strict")
    answers = (answer_start(row["prompt"]) + row["completion"] for row in evidence.rollouts)
    places = elsewhere(answers, evidence.style)
    nowhere = (Place.NONE, Place.THOUGHT)
    named = {Place(place): share for place, share in places.items() if place not in nowhere}
    marked = sum(share for place, share in named.items() if place is not Place.NUMBER)
    if gap <= MISPLACED and marked <= MISPLACED:
        return None
    where = ", ".join(f"{share:.0%} {WORDS[place]}" for place, share in named.items())
    seen = f"{gap:.0%} of the completions are right but not in the format"
    if where:
        seen += f"; answers stand elsewhere: {where}"
    return Finding(
        Diagnosis.MISPLACED,
        seen,
        "Use a prompt format with an example, or give the format rewards more weight.",
    )


def _dominated(evidence: Evidence) -> Finding | None:
    shares = reward_shares(evidence)
    if not shares:
        return None
    name, share = max(shares.items(), key=lambda item: item[1])
    if share <= DOMINANT or name in CORRECTNESS:
        return None
    return Finding(
        Diagnosis.DOMINATED,
        f"{share:.0%} of what tells completions of a group apart is '{name}'",
        f"Lower its weight (rewards.weights.{name}, now {evidence.weights.get(name, 1.0):g}), or "
        "raise those of correctness.",
    )


def reward_shares(evidence: Evidence) -> dict[str, float]:
    """Share of each reward in the variance of weighted rewards within groups; the sum is 1.
    Empty where no group's rewards differ."""
    parts: dict[str, float] = {}
    for group in _groups(evidence):
        for name, weight in evidence.weights.items():
            values = [row.get(f"reward_{name}") for row in group]
            known = [weight * value for value in values if value is not None]
            if len(known) > 1:
                parts[name] = parts.get(name, 0.0) + _variance(known)
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items()} if total else {}


def _collapsed(evidence: Evidence) -> Finding | None:
    entropy = evidence.trend("entropy")
    second_half = evidence.trend(rows=evidence.metrics[len(evidence.metrics) // 2 :])
    if (
        entropy.late_mean > COLLAPSED * entropy.early_mean
        or second_half.rose
        or evidence.level("strict") >= SOLVED
    ):
        return None
    return Finding(
        Diagnosis.COLLAPSED,
        f"the policy's entropy fell {entropy.early_mean:.3f} → {entropy.late_mean:.3f} nats per "
        f"token, and the reward has stopped rising: {second_half.words}",
        "Lower grpo.learning_rate, raise grpo.epsilon_high to 0.28 or set grpo.beta = 0.01.",
    )


RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    _drift,
    _dropout,
    _no_live_groups,
    _never_right,
    _truncated,
    _unreadable,
    _misplaced,
    _dominated,
    _small_rate,
    _few_modules,
    _clipped,
    _collapsed,
)
"""The gravest first."""


def examine(evidence: Evidence) -> list[Finding]:
    """What holds the run back, the gravest first; nothing for a run of fewer than `MIN_STEPS`."""
    if len(evidence.metrics) < MIN_STEPS:
        return []
    found = (rule(evidence) for rule in RULES)
    return [finding for finding in found if finding is not None]
