"""The audit: are a trainer and its sampler one policy, and if not, why not?

Random versions of the weights are synced one after the other, the way training syncs them, and
after each sync every probe looks: P1 at what went over the wire, P2 at the weights that the engine
computes with, P4 at the prefix cache, P3 at three log-probabilities of the same tokens. P0 looks
at both configurations first. An opening version, not examined, fills the cache and gives every
later one a predecessor that is neither the base nor itself, so that what stayed behind can be told
apart.

The trainer's weights are overwritten; whoever needs them makes another trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.audit.configuration import check_configuration, check_sampling
from tasks.audit.diagnosis import Cause, Diagnosis, Finding, Gap, Gaps, Probe, betrayed, diagnose
from tasks.audit.effective import check_effective
from tasks.audit.logprobs import check_cache, logprob_rows, measure
from tasks.audit.reference import Reference
from tasks.audit.rounding import FLOOR, limit_of, rounding
from tasks.audit.rows import Report, Row, fact
from tasks.audit.wire import WireTap
from tasks.sync.types import Sampled
from tasks.sync.versioned import VersionedGeneration

GROWTH = 3.0
"""Drift of the last sync, as a multiple of the first one's, from which it counts as growing."""
GROWTH_FLOOR = 0.1
"""Share of the limit below which growth is chance."""

UNSYNCABLE = (Cause.RANK, Cause.VOCABULARY)
"""What P0 finds that makes a sync impossible: the audit ends there."""


@dataclass(frozen=True)
class Settings:
    """What an audit is made with."""

    dtype: str
    """The run's number format."""
    by_adapter: bool
    """Adapter sync; else merged."""
    prompts: Sequence[Sequence[int]]
    """Token ids; they share a beginning longer than a cache block where the context allows."""
    num_samples: int
    """Completions per prompt."""
    max_tokens: int
    temperature: float
    """The run's. Everything is done at temperature 1; at another one, some of it once more."""
    batch_size: int
    """Completions per forward pass of the trainer."""
    num_syncs: int
    seed: int


@dataclass(frozen=True)
class Audit:
    """What came of it."""

    rows: list[Row]
    diagnosis: Diagnosis
    sync: int
    """The first sync after which something was wrong (0: before any), or how many were right."""
    drift: list[float]
    """Mean |generated − trainer| after each sync, in nats per token."""
    num_tokens: int
    """Tokens sampled."""

    @property
    def ok(self) -> bool:
        """Whether trainer and sampler are one policy."""
        return self.diagnosis.ok


def run_audit(
    trainer: Any,
    settings: Settings,
    on_sync: Callable[[int], None] = lambda sync: None,
) -> Audit:
    """Audit a GRPO trainer and its sampler. `on_sync` is told each sync that is done with."""
    return _Auditor(trainer, settings).run(on_sync)


class _Auditor:
    def __init__(self, trainer: Any, settings: Settings) -> None:
        self.trainer, self.settings = trainer, settings
        self.sampler: VersionedGeneration = trainer.vllm_generation
        self.reference = Reference(trainer.model, merged=not settings.by_adapter)
        self.limit = FLOOR[settings.dtype]
        self.rows: list[Row] = []
        self.num_tokens = 0

    def run(self, on_sync: Callable[[int], None]) -> Audit:
        settings = self.settings
        report = check_configuration(
            self.sampler.facts(),
            self.reference,
            settings.dtype,
            self.trainer.accelerator.mixed_precision,
            by_adapter=settings.by_adapter,
        )
        if any(finding.cause in UNSYNCABLE for finding in report.findings):
            known = Gaps(self.limit, findings=tuple(report.findings))
            return Audit(report.rows, diagnose(known), 0, [], 0)
        self.reference.redraw(settings.seed)
        self.sampler.sync_as(0)
        before = self._sample(1.0)
        self.limit = self._limit(before)
        report.add(check_sampling(self.sampler.facts().sampling, 1.0))
        self.rows += report.rows
        diagnosis, at = diagnose(Gaps(self.limit, findings=tuple(report.findings))), 0
        drift: list[float] = []
        for sync in range(1, settings.num_syncs + 1):
            gaps, before = self._one(sync, before)
            assert gaps.generated_trainer is not None
            drift.append(gaps.generated_trainer.mean)
            if diagnosis.ok:
                diagnosis, at = diagnose(gaps), sync
            on_sync(sync)
        if diagnosis.ok:
            diagnosis = self._growth(drift) or diagnosis
        return Audit(self.rows, diagnosis, at, drift, self.num_tokens)

    def _one(self, sync: int, before: Sequence[Sampled]) -> tuple[Gaps, list[Sampled]]:
        """Sync a new version and let every probe look."""
        settings = self.settings
        self.reference.redraw(settings.seed + sync)
        dtype = self.sampler.facts().dtype
        tap = WireTap(self.reference, sync, dtype, by_adapter=settings.by_adapter)
        self.sampler.sync_as(sync, tap)
        report = self._wire(tap, sync)
        weights = self.sampler.effective_weights()
        report.add(check_effective(self.reference, sync, weights, dtype))
        sampled = self._sample(1.0)
        report.add(check_cache(sync, before, sampled))
        gaps = self._measure(sync, sampled, 1.0, report)
        if settings.temperature != 1:
            other = self._sample(settings.temperature)
            report.add(check_sampling(self.sampler.facts().sampling, settings.temperature))
            at_run = self._measure(sync, other, settings.temperature, report)
            finding = _at_run_temperature(gaps, at_run, settings.temperature)
            report.findings += [] if finding is None else [finding]
        self.rows += report.rows
        return replace(gaps, findings=tuple(report.findings)), sampled

    def _limit(self, sampled: Sequence[Sampled]) -> Gap:
        """What rounding explains in this model."""
        dtype, batch_size = self.settings.dtype, self.settings.batch_size
        some = sampled[:: self.settings.num_samples]
        found = rounding(self.trainer, some, dtype, batch_size=batch_size)
        on_gpu = self.trainer.accelerator.device.type != "cpu"
        return limit_of(found, dtype, on_gpu=on_gpu)

    def _wire(self, tap: WireTap, sync: int) -> Report:
        if tap.seen or self.sampler.facts().mode == "colocate":
            return tap.report()
        return Report([fact(Probe.WIRE, "names", True, "not seen from here: P2", sync=sync)])

    def _measure(
        self, sync: int, sampled: list[Sampled], temperature: float, report: Report
    ) -> Gaps:
        gaps = measure(
            self.trainer,
            sampled,
            temperature,
            self.limit,
            batch_size=self.settings.batch_size,
            in_evaluation=sync == 1 and temperature == 1,
        )
        num_tokens = sum(len(one.token_ids) for one in sampled)
        report.rows += logprob_rows(sync, gaps, num_tokens, temperature)
        return gaps

    def _sample(self, temperature: float) -> list[Sampled]:
        settings = self.settings
        found = self.sampler.sample(
            settings.prompts,
            n=settings.num_samples,
            temperature=temperature,
            max_tokens=settings.max_tokens,
        )
        self.num_tokens += sum(len(one.token_ids) for one in found)
        return found

    def _growth(self, drift: Sequence[float]) -> Diagnosis | None:
        """A diagnosis when drift grew from sync to sync."""
        first, last = drift[0], drift[-1]
        grew = last > GROWTH * first and last > GROWTH_FLOOR * self.limit.mean
        self.rows.append(
            Row(
                len(drift),
                Probe.LOGPROBS,
                "growth from first to last sync",
                "times",
                len(drift),
                last / first if first else 1.0,
                GROWTH,
                not grew,
                f"{first:.1e} to {last:.1e} nats per token",
            )
        )
        if not grew:
            return None
        words = f"drift grew from {first:.1e} to {last:.1e} nats per token in {len(drift)} syncs"
        finding = Finding(Probe.LOGPROBS, Cause.GROWTH, words)
        return diagnose(Gaps(self.limit, findings=(finding,)))


def _at_run_temperature(gaps: Gaps, at_run: Gaps, temperature: float) -> Finding | None:
    """A finding when sampler and trainer agree at temperature 1 and not at the run's."""
    assert gaps.generated_trainer is not None and at_run.generated_trainer is not None
    worse = at_run.generated_trainer.beyond(gaps.limit)
    if not worse and not betrayed(at_run.surprise):
        return None
    if gaps.generated_trainer.beyond(gaps.limit) or betrayed(gaps.surprise):
        return None
    words = (
        f"sampler and trainer agree at temperature 1, not at the run's {temperature:g}: the two "
        "don't scale by it alike"
    )
    return Finding(Probe.LOGPROBS, Cause.SAMPLING, words)
