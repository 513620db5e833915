"""Compare variants that answered the same questions, question by question.

A `Variant` holds its answers as arrays of shape [questions, samples] (suffix _qs), one set per
decoding, all variants in the same order of questions and samples. `compare_pair` gives the rows of
the 'comparison' table, `describe_variant` the accuracy of one variant alone. Everything is reported
per benchmark and per difficulty band of it; benchmarks are never pooled. The bands of a benchmark
are tested together, so their p-values are Holm's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ratchet.errors import UserError
from ratchet.evaluation.bands import band_order
from ratchet.evaluation.stats import (
    change_interval,
    cons_at_k,
    holm,
    mcnemar_exact,
    pass_at_k,
    smallest_detectable_difference,
    wilson,
    wilson_mean,
)

if TYPE_CHECKING:
    import numpy as np

METRICS = ("strict", "lenient")
ALL_BANDS = "all"
SAME = 1e-9  # figures of a question closer than this are equal


@dataclass(frozen=True)
class Answers:
    """What one variant answered under one decoding."""

    strict_qs: np.ndarray
    lenient_qs: np.ndarray
    truncated_qs: np.ndarray
    status_qs: np.ndarray
    num_tokens_qs: np.ndarray
    ballots_qs: np.ndarray
    """A number per answer, equal for equal answers, −1 where none was read."""

    @property
    def num_samples(self) -> int:
        """Answers per question."""
        return int(self.strict_qs.shape[1])

    def metric_qs(self, metric: str) -> np.ndarray:
        """The verdicts of one metric."""
        return self.strict_qs if metric == "strict" else self.lenient_qs

    def values_q(self, metric: str, rows_q: np.ndarray) -> np.ndarray:
        """One figure per question of a slice: its share of right samples ('strict', 'lenient'), or
        its 'pass@k' or 'cons@k' of lenient verdicts."""
        import numpy as np

        kind, _, k = metric.partition("@")
        if not k:
            return self.metric_qs(metric)[rows_q].mean(axis=1)
        right_qs = self.lenient_qs[rows_q]
        if kind == "cons":
            return cons_at_k(self.ballots_qs[rows_q], right_qs, int(k))
        return pass_at_k(np.full(len(right_qs), self.num_samples), right_qs.sum(axis=1), int(k))


@dataclass(frozen=True)
class Variant:
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
        found = sorted(set(bands[inside]), key=band_order)
        if len(found) > 1:
            for band in found:
                yield Slice(benchmark, band, inside & (bands == band))


def named_slice(parts: list[Slice], benchmark: str, band: str) -> Slice:
    """The slice of these names. UserError when the benchmark has no such band, or no question."""
    for part in parts:
        if (part.benchmark, part.band) == (benchmark, band):
            return part
    mine = [part.band for part in parts if part.benchmark == benchmark]
    if mine:
        raise UserError(
            f"band '{band}' of {benchmark} holds no question: its bands are {', '.join(mine)}"
        )
    names = ", ".join(dict.fromkeys(part.benchmark for part in parts))
    raise UserError(f"no question belongs to benchmark '{benchmark}': there are {names}")


def some_ks(num_samples: int) -> list[int]:
    """1, 2, 4, … and the number of samples itself."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


def at_ks(found: Answers, part: Slice, confidence: float) -> list[dict[str, Any]]:
    """pass@k and cons@k of one variant by k, with intervals; empty for one answer a question."""
    rows = []
    for kind in ("pass", "cons") if found.num_samples > 1 else ():
        for k in some_ks(found.num_samples):
            values_q = found.values_q(f"{kind}@{k}", part.rows_q)
            low, high = wilson_mean(values_q, confidence)
            value = float(values_q.mean())
            rows.append({"kind": kind, "k": k, "value": value, "low": low, "high": high})
    return rows


def describe_variant(
    variant: Variant, decoding: str, part: Slice, confidence: float
) -> dict[str, Any]:
    """Accuracy, failure rates and lengths of one variant on one slice; shares are 0 to 1.

    Intervals are Wilson's, for several answers a question with the effective number of questions.
    """
    found = variant.answers[decoding]
    rows = part.rows_q
    status = found.status_qs[rows]
    row: dict[str, Any] = {
        "variant": variant.name,
        "decoding": decoding,
        "benchmark": part.benchmark,
        "band": part.band,
        "num_questions": int(rows.sum()),
        "samples_per_question": found.num_samples,
        "truncated_share": float(found.truncated_qs[rows].mean()),
        "mean_tokens": float(found.num_tokens_qs[rows].mean()),
        "status_rates": {name: float((status == name).mean()) for name in sorted(set(status.flat))},
        "at_k": at_ks(found, part, confidence),
    }
    for metric in METRICS:
        values_q = found.values_q(metric, rows)
        row[metric] = float(values_q.mean())
        row[f"{metric}_low"], row[f"{metric}_high"] = (
            wilson(int(values_q.sum()), len(values_q), confidence)
            if found.num_samples == 1
            else wilson_mean(values_q, confidence)
        )
    return row


def compare_pair(
    a: Variant, b: Variant, metric: str, decoding: str, part: Slice, confidence: float, seed: int
) -> dict[str, Any]:
    """One row of the 'comparison' table: b minus a.

    A question is gained when its figure (`Answers.values_q`) is higher under b than under a, lost
    when it is lower; the p-value is McNemar's exact test on those counts, which with several
    samples per question is the sign test over questions. `p_adjusted` is that of
    `compare_variants`.
    """
    values_a = a.answers[decoding].values_q(metric, part.rows_q)
    values_b = b.answers[decoding].values_q(metric, part.rows_q)
    change_q = values_b - values_a
    low, high = change_interval(change_q, confidence, seed)
    gained, lost = int((change_q > SAME).sum()), int((change_q < -SAME).sum())
    p_value = mcnemar_exact(gained, lost)
    return {
        "metric": metric,
        "decoding": decoding,
        "benchmark": part.benchmark,
        "band": part.band,
        "variant_a": a.name,
        "variant_b": b.name,
        "num_questions": len(change_q),
        "value_a": float(values_a.mean()),
        "value_b": float(values_b.mean()),
        "difference": float(values_b.mean() - values_a.mean()),
        "ci_low": low,
        "ci_high": high,
        "p_value": p_value,
        "p_adjusted": p_value,
        "gained": gained,
        "lost": lost,
    }


def format_gain(
    a: Variant, b: Variant, decoding: str, part: Slice, confidence: float, seed: int
) -> dict[str, float]:
    """How much of b's strict gain over a isn't in the lenient score, with its paired interval."""
    gap_a, gap_b = (
        variant.answers[decoding].values_q("strict", part.rows_q)
        - variant.answers[decoding].values_q("lenient", part.rows_q)
        for variant in (a, b)
    )
    low, high = change_interval(gap_b - gap_a, confidence, seed)
    return {"difference": float(gap_b.mean() - gap_a.mean()), "ci_low": low, "ci_high": high}


def metrics_of(found: Answers) -> tuple[str, ...]:
    """What pairs are compared by: the verdicts and, with several samples, pass and consensus."""
    n = found.num_samples
    return METRICS if n == 1 else (*METRICS, f"pass@{n}", f"cons@{n}")


def compare_variants(
    variants: list[Variant], parts: list[Slice], confidence: float, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of the 'comparison' table over all pairs, descriptions of the single variants).

    The p-values of a benchmark's bands are adjusted together, by metric, decoding and pair of
    variants; a whole benchmark's stays as it is.
    """
    compared, described = [], []
    for decoding, answers in variants[0].answers.items():
        for part in parts:
            described += [
                describe_variant(variant, decoding, part, confidence) for variant in variants
            ]
        for metric in metrics_of(answers):
            for a, b in combinations(variants, 2):
                rows = [
                    compare_pair(a, b, metric, decoding, part, confidence, seed) for part in parts
                ]
                adjust(rows)
                compared += rows
    return compared, described


def adjust(rows: list[dict[str, Any]]) -> None:
    """Holm's p-values over the bands of each benchmark among `rows`, written into them."""
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        bands = [r for r in rows if r["benchmark"] == benchmark and r["band"] != ALL_BANDS]
        for row, p in zip(bands, holm([row["p_value"] for row in bands]), strict=True):
            row["p_adjusted"] = p


def detectable(row: dict[str, Any], confidence: float) -> float:
    """Smallest true difference that a test like `row`'s would have found 4 times of 5."""
    discordance = (row["gained"] + row["lost"]) / row["num_questions"]
    return smallest_detectable_difference(row["num_questions"], discordance, confidence)
