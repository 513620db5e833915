"""Compare arms that answered the same questions, question by question.

An `Arm` holds its answers as arrays of shape [questions, samples] (suffix _qs), one set per
decoding, all arms in the same order of questions and samples. `compare_pair` gives the rows of the
'comparison' table, `describe_arm` the accuracy of one arm alone. Everything is reported per
benchmark and per difficulty band of it; benchmarks are never pooled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ratchet.stats import (
    bootstrap_mean,
    mcnemar_exact,
    paired_bootstrap,
    pass_at_k,
    smallest_detectable_difference,
    wilson,
)

if TYPE_CHECKING:
    import numpy as np

METRICS = ("strict", "lenient")
ALL_BANDS = "all"


@dataclass(frozen=True)
class Answers:
    """What one arm answered under one decoding."""

    strict_qs: np.ndarray
    lenient_qs: np.ndarray
    truncated_qs: np.ndarray
    status_qs: np.ndarray
    num_tokens_qs: np.ndarray

    def metric_qs(self, metric: str) -> np.ndarray:
        """The verdicts of one metric."""
        return self.strict_qs if metric == "strict" else self.lenient_qs


@dataclass(frozen=True)
class Arm:
    """One model's answers, by decoding ('greedy', 'sampled')."""

    name: str
    answers: dict[str, Answers]


@dataclass(frozen=True)
class Slice:
    """Questions that a figure is about: one benchmark, or one band of it."""

    benchmark: str
    band: str
    rows_q: np.ndarray
    """Mask over all questions."""


def slices(benchmark_q: list[str], band_q: list[str]) -> Iterator[Slice]:
    """Each benchmark in order of appearance, whole and then by band (if it has several)."""
    import numpy as np

    benchmarks, bands = np.asarray(benchmark_q, dtype=object), np.asarray(band_q, dtype=object)
    for benchmark in dict.fromkeys(benchmark_q):
        inside = benchmarks == benchmark
        yield Slice(benchmark, ALL_BANDS, inside)
        found = sorted(set(bands[inside]))
        if len(found) > 1:
            for band in found:
                yield Slice(benchmark, band, inside & (bands == band))


def describe_arm(
    arm: Arm, decoding: str, part: Slice, confidence: float, seed: int
) -> dict[str, Any]:
    """Accuracy, failure rates and lengths of one arm on one slice; shares are 0 to 1.

    Intervals are Wilson's for one answer per question, and a bootstrap by question for several.
    """
    found = arm.answers[decoding]
    rows = part.rows_q
    status, samples = found.status_qs[rows], found.strict_qs.shape[1]
    row: dict[str, Any] = {
        "arm": arm.name,
        "decoding": decoding,
        "benchmark": part.benchmark,
        "band": part.band,
        "num_questions": int(rows.sum()),
        "samples_per_question": samples,
        "truncated_share": float(found.truncated_qs[rows].mean()),
        "mean_tokens": float(found.num_tokens_qs[rows].mean()),
        "status_rates": {name: float((status == name).mean()) for name in sorted(set(status.flat))},
    }
    for metric in METRICS:
        right_qs = found.metric_qs(metric)[rows]
        row[metric] = float(right_qs.mean())
        row[f"{metric}_low"], row[f"{metric}_high"] = (
            wilson(int(right_qs.sum()), len(right_qs), confidence)
            if samples == 1
            else bootstrap_mean(right_qs.mean(axis=1), confidence, seed)
        )
        if samples > 1:
            right_q = right_qs.sum(axis=1)
            row[f"{metric}_pass_at_k"] = float(
                pass_at_k([samples] * len(right_q), right_q, samples).mean()
            )
    return row


def compare_pair(
    a: Arm, b: Arm, metric: str, decoding: str, part: Slice, confidence: float, seed: int
) -> dict[str, Any]:
    """One row of the 'comparison' table: b minus a.

    A question is gained when more of its samples are right under b than under a, lost when fewer;
    the p-value is McNemar's exact test on those counts, which with several samples per question is
    the sign test over questions.
    """
    right_a = a.answers[decoding].metric_qs(metric)[part.rows_q]
    right_b = b.answers[decoding].metric_qs(metric)[part.rows_q]
    change_q = right_b.mean(axis=1) - right_a.mean(axis=1)
    low, high = paired_bootstrap(right_a, right_b, confidence, seed)
    gained, lost = int((change_q > 0).sum()), int((change_q < 0).sum())
    return {
        "metric": metric,
        "decoding": decoding,
        "benchmark": part.benchmark,
        "band": part.band,
        "arm_a": a.name,
        "arm_b": b.name,
        "num_questions": len(change_q),
        "value_a": float(right_a.mean()),
        "value_b": float(right_b.mean()),
        "difference": float(right_b.mean() - right_a.mean()),
        "ci_low": low,
        "ci_high": high,
        "p_value": mcnemar_exact(gained, lost),
        "gained": gained,
        "lost": lost,
    }


def format_gain(
    a: Arm, b: Arm, decoding: str, part: Slice, confidence: float, seed: int
) -> dict[str, float]:
    """How much of b's strict gain over a isn't in the lenient score, with its paired interval."""
    gap_a, gap_b = (
        arm.answers[decoding].strict_qs[part.rows_q].astype(float)
        - arm.answers[decoding].lenient_qs[part.rows_q]
        for arm in (a, b)
    )
    low, high = paired_bootstrap(gap_a, gap_b, confidence, seed)
    return {"difference": float(gap_b.mean() - gap_a.mean()), "ci_low": low, "ci_high": high}


def compare_arms(
    arms: list[Arm], parts: list[Slice], confidence: float, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of the 'comparison' table over all pairs, descriptions of the single arms)."""
    compared, described = [], []
    for decoding in arms[0].answers:
        for part in parts:
            described += [describe_arm(arm, decoding, part, confidence, seed) for arm in arms]
            compared += [
                compare_pair(a, b, metric, decoding, part, confidence, seed)
                for metric in METRICS
                for a, b in combinations(arms, 2)
            ]
    return compared, described


def detectable(row: dict[str, Any], confidence: float) -> float:
    """Smallest true difference that a test like `row`'s would have found 4 times of 5."""
    discordance = (row["gained"] + row["lost"]) / row["num_questions"]
    return smallest_detectable_difference(row["num_questions"], discordance, confidence)
