"""The drift guard: after every batch of completions, is the sampler still the trainer's policy?

The trainer holds the figures of a batch against these levels before it trains on the batch, so
what another policy made never reaches the weights; the report draws the same band. What counts as
much:

* Drift is compared with its level at step 1. That level is kept between what rounding explains at
  least and at most in the run's number format, so neither a lucky nor a sick first step moves the
  band.
* The mean ratio is 1 for the policy that was sampled from, whatever the policy: a distance counts
  only beyond `CHANCE` standard errors.
* Whether the *trainer's* distribution was the one sampled from also when both sides log the same
  wrong figure (raw log-probabilities of a truncated distribution) shows in the surprise: log p of
  the sampled tokens plus the entropy there averages to 0.

A run of one process and one of many decide the same: figures are means over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ratchet.config.run import Dtype, GuardConfig
from ratchet.errors import UserError

ROUNDING: dict[str, tuple[float, float]] = {"float32": (1e-5, 1e-4), "bfloat16": (2e-3, 2e-2)}
"""Mean drift, in nats per token, that rounding alone explains: at least and at most."""
CHANCE = 5.0
"""Standard errors that a mean may be away from its expectation by chance: one false alarm in
3.5 million steps, were it normal."""


class Level(StrEnum):
    """How far a figure has gone."""

    WARN = "warn"
    HALT = "halt"


@dataclass(frozen=True)
class Finding:
    """One figure beyond a level."""

    level: Level
    figure: str
    words: str
    """What was seen, against what, for people."""


class DriftError(UserError):
    """Sampler and trainer are no longer the same policy; training has stopped before the batch."""


def _over(value: float, warn: float, halt: float) -> Level | None:
    if value > halt:
        return Level.HALT
    return Level.WARN if value > warn else None


def healthy_drift(first_drift: float, dtype: Dtype) -> float:
    """Drift of a healthy step, in nats per token: that of step 1 where rounding explains it."""
    low, high = ROUNDING[dtype]
    return min(max(first_drift, low), high)


class Guard:
    """Holds the figures of each batch against the levels of `config`.

    `first_drift` is the drift of step 1 where a resumed run knows it.
    """

    def __init__(self, config: GuardConfig, dtype: Dtype, first_drift: float | None = None) -> None:
        self.config = config
        self.dtype = dtype
        self.first_drift = first_drift
        self.surprise: tuple[float, float] | None = None
        self.num_warnings = 0

    @property
    def drift_level(self) -> float:
        """Drift of a healthy step, in nats per token; known after the first batch."""
        assert self.first_drift is not None
        return healthy_drift(self.first_drift, self.dtype)

    def check(self, figures: Mapping[str, float]) -> list[Finding]:
        """What is out of bounds in a batch; nothing where no sampler but the trainer's own model
        made it."""
        if "drift_mean" not in figures:
            return []
        if self.first_drift is None:
            self.first_drift = figures["drift_mean"]
        found = [
            self._drift(figures["drift_mean"]),
            self._dropped(figures["dropped_share"]),
            self._effective(figures["effective_sample_share"]),
            self._chance(
                "the mean importance ratio is",
                figures["unmasked_ratio_mean"],
                1.0,
                figures["unmasked_ratio_se"],
            ),
        ]
        return [finding for finding in found if finding is not None]

    def check_surprise(self, mean: float, error: float) -> list[Finding]:
        """The same for the surprise of a batch, which is known once the batch has been scored."""
        self.surprise = (mean, error)
        found = self._chance("log p of the sampled tokens plus the entropy is", mean, 0.0, error)
        return [] if found is None else [found]

    def _drift(self, drift: float) -> Finding | None:
        level = self.drift_level
        reached = _over(drift, self.config.warn_drift * level, self.config.halt_drift * level)
        if reached is None:
            return None
        words = (
            f"drift {drift:.1e} nats per token, {drift / level:.0f} times the level of a healthy "
            f"step ({level:.1e})"
        )
        return Finding(reached, "drift_mean", words)

    def _dropped(self, share: float) -> Finding | None:
        reached = _over(share, self.config.warn_dropped, self.config.halt_dropped)
        words = f"{share:.0%} of the completions dropped by the importance mask"
        return None if reached is None else Finding(reached, "dropped_share", words)

    def _effective(self, share: float) -> Finding | None:
        reached = _over(1 - share, 1 - self.config.warn_effective, 1 - self.config.halt_effective)
        words = f"an effective sample size of {share:.0%} of the batch"
        return None if reached is None else Finding(reached, "effective_sample_share", words)

    def _chance(self, name: str, mean: float, expected: float, error: float) -> Finding | None:
        distance = abs(mean - expected)
        if distance <= CHANCE * error:
            return None
        reached = _over(distance, self.config.warn_ratio, self.config.halt_ratio)
        words = f"{name} {mean:.3f} ± {error:.3f} (standard error), not {expected:.0f}"
        figure = "unmasked_ratio_mean" if expected else "surprise_mean"
        return None if reached is None else Finding(reached, figure, words)

    def act(self, step: int, findings: list[Finding], log: Callable[[str], None]) -> list[Finding]:
        """Log what is out of bounds at `step`; returns the findings to halt for."""
        halting = [
            finding for finding in findings if finding.level is Level.HALT and self.config.halt
        ]
        for finding in findings:
            if finding not in halting:
                self.num_warnings += 1
                log(f"warning: step {step}: {finding.words}: sampler and trainer may differ")
        return halting
