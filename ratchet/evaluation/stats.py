"""Intervals and tests for accuracies measured on the same questions.

Every function takes plain numbers or arrays and returns floats. Questions are what is sampled from
the world, so everything random is resampled by question: several completions of one question stay
together. Which interval goes where follows from how often each covers the truth, as measured in
docs/evaluation.md:

one variant, one answer a question     `wilson`
one variant, a mean per question       `wilson_mean`, with the effective number of questions
two variants, one answer a question    `tango`, the score interval of McNemar's test
two variants, a mean per question      `bootstrap_mean` of the differences, widened for small n
two gains on different questions       `difference_interval`

numpy and scipy are imported inside the functions to keep this module light.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

RESAMPLES = 10_000
POWER = 0.8
FEW_QUESTIONS = 15
"""Where so few questions make up all that is missing from 1 (or all that is above 0), a sample's
own variance is no guide to the interval."""
CERTAIN = 1e-9


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927).

    ValueError unless 0 ≤ successes ≤ n and n ≥ 1.
    """
    from scipy.stats import binomtest

    if n < 1:
        raise ValueError("an interval needs at least one observation")
    found = binomtest(int(successes), int(n)).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def wilson_mean(values_q: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of one value in [0, 1] per question, shape [questions].

    Wilson's with the effective number of questions n v (1 − v) / s², v being the mean and s² the
    values' variance, and Student's t with n − 1 degrees of freedom for the normal quantile, as for
    proportions in cluster samples (Korn and Graubard 1998; Franco et al. 2019). Near 0 and 1 the
    variance hangs on few questions, (Σ w)² / Σ w² of them for w the distances from that end (Kish
    1965). Below `FEW_QUESTIONS` the effective number is n at most, which is rather too wide.
    ValueError for an empty input or a value outside [0, 1].
    """
    import numpy as np
    from scipy.stats import t

    values = np.asarray(values_q, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"expected one value per question, got shape {values.shape}")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("values must lie in [0, 1]")
    n, mean, spread = len(values), float(values.mean()), float(values.var())
    effective = n * mean * (1 - mean) / spread if spread > 0 else n
    away = values if mean < 0.5 else 1 - values
    if away.sum() ** 2 < FEW_QUESTIONS * (away**2).sum() or not away.any():
        effective = min(effective, n)
    quantile = float(t.ppf((1 + confidence) / 2, max(n - 1, 1)))
    shrink = 1 + quantile**2 / effective
    centre = (mean + quantile**2 / (2 * effective)) / shrink
    half = quantile * (mean * (1 - mean) / effective + (quantile / (2 * effective)) ** 2) ** 0.5
    return max(0.0, centre - half / shrink), min(1.0, centre + half / shrink)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: are gains as likely as losses?

    `gained` and `lost` count the questions on which the two variants differ; those on which they
    agree carry no information. 1.0 when there are none.
    """
    from scipy.stats import binomtest

    if gained + lost == 0:
        return 1.0
    return float(binomtest(int(gained), int(gained + lost), 0.5).pvalue)


def tango(gained: int, lost: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of the difference of two accuracies on the same n questions (Tango 1998).

    The differences δ that a score test doesn't reject: |g − l − n δ| ≤ z √(n (2 q + δ (1 − δ))),
    where q is the likeliest chance of a loss given δ, the larger root of
    2 n q² + ((2 n − g + l) δ − g − l) q − l δ (1 − δ) = 0. It is asymmetric and has a width
    where no answer changed. ValueError unless the counts are those of n ≥ 1 questions.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    if n < 1 or min(gained, lost) < 0 or gained + lost > n:
        raise ValueError(f"{gained} gained and {lost} lost are not among {n} questions")
    z = float(norm.ppf((1 + confidence) / 2))
    if gained == lost == 0:
        return -(z**2) / (n + z**2), z**2 / (n + z**2)
    found = (gained - lost) / n

    def excess(delta: float, side: int) -> float:
        """Positive where δ lies outside the interval on `side` (1: below it, −1: above)."""
        b = (2 * n - gained + lost) * delta - gained - lost
        c = -lost * delta * (1 - delta)
        q = ((b * b - 8 * n * c) ** 0.5 - b) / (4 * n)
        gap = gained - lost - n * delta
        return side * gap - z * max(0.0, n * (2 * q + delta * (1 - delta))) ** 0.5

    low = -1.0 if lost == n else float(brentq(excess, -1.0, found, (1,), xtol=1e-12))
    high = 1.0 if gained == n else float(brentq(excess, found, 1.0, (-1,), xtol=1e-12))
    return low, high


def bootstrap_mean(
    values_q: ArrayLike, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Bootstrap interval of the mean of one value per question, shape [questions].

    Percentiles of the resampled means, taken further out than the level alone asks for, so that
    few questions get the width that Student's t would give them (Hesterberg 2015, "expanded
    percentile interval"). Drawing n questions with replacement is drawing how often each distinct
    value comes up, so the resampling is one multinomial draw per resample: exact, and cheap where
    few values occur. ValueError for an empty or non-finite input.
    """
    import numpy as np
    from scipy.stats import norm, t

    values = np.asarray(values_q, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"expected one value per question, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("values must be finite")
    n = len(values)
    distinct_v, count_v = np.unique(values, return_counts=True)
    rng = np.random.default_rng(seed)
    block = max(1, 4_000_000 // len(distinct_v))  # resamples held in memory at once
    means = np.concatenate(
        [
            rng.multinomial(n, count_v / n, min(block, resamples - start)) @ distinct_v
            for start in range(0, resamples, block)
        ]
    ) / n  # fmt: skip
    tail = (1 - confidence) / 2
    if n > 1:
        tail = float(norm.cdf((n / (n - 1)) ** 0.5 * t.ppf(tail, n - 1)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def change_interval(
    change_q: ArrayLike, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Interval of the mean change per question, shape [questions]: Tango's where every change is
    −1, 0 or 1 (one answer a question), the bootstrap otherwise."""
    import numpy as np

    change = np.asarray(change_q, dtype=np.float64)
    if np.isin(change, (-1.0, 0.0, 1.0)).all() and len(change):
        return tango(int((change > 0).sum()), int((change < 0).sum()), len(change), confidence)
    return bootstrap_mean(change, confidence, seed)


Estimate = tuple[float, float, float]
"""(value, lower end, upper end)."""


def difference_interval(a: Estimate, b: Estimate) -> Estimate:
    """b − a where both were measured on different questions, with its interval.

    From the two intervals alone, asymmetric as they are: the lower end is
    d − √((b − b_low)² + (a_high − a)²), the upper one alike (Newcombe 1998; Zou and Donner 2008).
    """
    difference = b[0] - a[0]
    low = difference - ((b[0] - b[1]) ** 2 + (a[2] - a[0]) ** 2) ** 0.5
    high = difference + ((b[2] - b[0]) ** 2 + (a[0] - a[1]) ** 2) ** 0.5
    return difference, low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values: below α for all that stay significant together."""
    from statsmodels.stats.multitest import multipletests

    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]


def pass_at_k(num_samples: ArrayLike, num_right: ArrayLike, k: int) -> np.ndarray:
    """Unbiased estimate of the chance that at least one of k samples is right, per question.

    1 − C(n−c, k) / C(n, k) for n samples of which c are right (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code"): the chance that k of the n, drawn without replacement, hold
    a right one. ValueError when k exceeds the samples of a question.
    """
    import numpy as np
    from scipy.stats import hypergeom

    n, c = np.asarray(num_samples), np.asarray(num_right)
    if k < 1 or (n < k).any():
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples of every question")
    return 1 - np.asarray(hypergeom.pmf(0, n, c, k))


def cons_at_k(ballots_qs: ArrayLike, right_qs: ArrayLike, k: int) -> np.ndarray:
    """Chance that the commonest answer among k samples is right, per question: cons@k, maj@k.

    `ballots_qs` [questions, samples] holds a number per answer, equal for answers that are the
    same, negative where none was read (which casts no vote); `right_qs` says which samples are
    right. Averaged over the n cyclic runs of k neighbouring samples, each of which is a draw of k,
    so the estimate is unbiased; a tie counts for the share of the tied answers that are right.
    ValueError when k exceeds the samples.
    """
    import numpy as np

    ballots, right = np.asarray(ballots_qs), np.asarray(right_qs, dtype=bool)
    num_samples = ballots.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"cons@{k} needs {max(k, 1)} samples of every question")
    starts = range(num_samples) if k < num_samples else range(1)
    total = np.zeros(len(ballots))
    for start in starts:
        columns = (start + np.arange(k)) % num_samples
        vote, good = ballots[:, columns], right[:, columns]
        # votes each sample's answer got; tied answers weigh alike however many samples hold them
        support = (vote[:, :, None] == vote[:, None, :]).sum(axis=2) * (vote >= 0)
        leads = (support == support.max(axis=1, keepdims=True)) & (vote >= 0)
        share = leads / np.maximum(support, 1)
        total += (share * good).sum(axis=1) / np.maximum(share.sum(axis=1), CERTAIN)
    return total / len(starts)


def mcnemar_power(n: int, discordance: float, difference: float, confidence: float = 0.95) -> float:
    """Chance that McNemar's exact test finds a true `difference` of two accuracies.

    `discordance` is the share of the n questions on which the variants differ, raised to the
    difference where it is smaller. Summed over the number of changed answers and, given that, over
    the gains.
    """
    import numpy as np
    from scipy.stats import binom

    share = max(discordance, abs(difference))
    if share == 0:
        return 0.0
    changed = np.arange(n + 1)
    weight = binom.pmf(changed, n, share)
    likely = weight > CERTAIN / n
    changed, weight = changed[likely], weight[likely]
    # the largest number of losses that is still significant, −1 where none is
    critical = binom.ppf((1 - confidence) / 2, changed, 0.5)
    critical -= 2 * binom.cdf(critical, changed, 0.5) > 1 - confidence
    losing = (share - difference) / (2 * share)
    chance = binom.cdf(critical, changed, losing) + binom.sf(
        changed - critical - 1, changed, losing
    )
    return float(weight @ chance)


def smallest_detectable_difference(
    n: int, discordance: float, confidence: float = 0.95, power: float = POWER
) -> float:
    """Smallest true difference of two accuracies that McNemar's exact test finds with chance
    `power`, given the share of questions on which the variants differ.

    A difference can't exceed the discordance, so that is raised where it is smaller. 1.0 where n is
    too small to see any difference. ValueError unless n ≥ 1 and 0 ≤ discordance ≤ 1.
    """
    from scipy.optimize import brentq

    if n < 1 or not 0 <= discordance <= 1:
        raise ValueError(f"no test has n={n} and discordance={discordance}")

    def shortfall(difference: float) -> float:
        return power - mcnemar_power(n, discordance, difference, confidence)

    if shortfall(1.0) >= 0:
        return 1.0
    return float(brentq(shortfall, CERTAIN, 1.0, xtol=1e-6))
