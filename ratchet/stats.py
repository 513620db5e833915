"""Intervals and tests for accuracies measured on the same questions.

Every function takes plain numbers or arrays and returns floats. Questions are what is sampled from
the world, so everything random is resampled by question: several completions of one question stay
together. numpy and scipy are imported inside the functions to keep this module light.

Not covered: corrections for many comparisons, and intervals of pass@k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

RESAMPLES = 10_000
POWER = 0.8


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927).

    ValueError unless 0 ≤ successes ≤ n and n ≥ 1.
    """
    from scipy.stats import binomtest

    if n < 1:
        raise ValueError("an interval needs at least one observation")
    found = binomtest(int(successes), int(n)).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: are gains as likely as losses?

    `gained` and `lost` count the questions on which the two arms differ; those on which they agree
    carry no information. 1.0 when there are none.
    """
    from scipy.stats import binomtest

    if gained + lost == 0:
        return 1.0
    return float(binomtest(int(gained), int(gained + lost), 0.5).pvalue)


def bootstrap_mean(
    values_q: ArrayLike, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of one value per question, shape [questions].

    Drawing n questions with replacement is drawing how often each distinct value comes up, so the
    resampling is one multinomial draw per resample: exact, and cheap where few values occur.
    ValueError for an empty or non-finite input.
    """
    import numpy as np

    values = np.asarray(values_q, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"expected one value per question, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("values must be finite")
    distinct_v, count_v = np.unique(values, return_counts=True)
    rng = np.random.default_rng(seed)
    block = max(1, 4_000_000 // len(distinct_v))  # resamples held in memory at once
    means = np.concatenate(
        [
            rng.multinomial(len(values), count_v / len(values), min(block, resamples - start))
            @ distinct_v
            for start in range(0, resamples, block)
        ]
    ) / len(values)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def question_means(values: ArrayLike) -> np.ndarray:
    """Mean per question of [questions] or [questions, samples]: shape [questions]."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    return array if array.ndim == 1 else array.mean(axis=1)


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Bootstrap interval of mean(b) − mean(a) where both arms answered the same questions.

    `a` and `b` have shape [questions] or [questions, samples], in the same order of questions; the
    number of samples may differ. Questions are resampled and their samples stay with them: the
    spread between samples is already in the question's mean, and drawing samples again would count
    it twice. ValueError when the numbers of questions differ.
    """
    mean_a, mean_b = question_means(a), question_means(b)
    if mean_a.shape != mean_b.shape:
        raise ValueError(f"{len(mean_a)} questions in one arm, {len(mean_b)} in the other")
    return bootstrap_mean(mean_b - mean_a, confidence, seed, resamples)


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


def smallest_detectable_difference(
    n: int, discordance: float, confidence: float = 0.95, power: float = POWER
) -> float:
    """Smallest true difference of two accuracies that McNemar's test finds with chance `power`.

    `discordance` is the share of the n questions on which the arms differ. Solves
    n δ² = (z_{1−α/2} √π + z_{power} √(π − δ²))² for δ (Miettinen 1968; Connor 1987), π being the
    discordance. A difference can't exceed the discordance, so π is raised to δ where it is
    smaller. 1.0 where n is too small to see any difference. ValueError unless n ≥ 1 and
    0 ≤ discordance ≤ 1.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    if n < 1 or not 0 <= discordance <= 1:
        raise ValueError(f"no test has n={n} and discordance={discordance}")
    z_level = float(norm.ppf((1 + confidence) / 2))
    z_power = float(norm.ppf(power))

    def shortfall(delta: float) -> float:
        share = max(discordance, delta)
        needed = z_level * share**0.5 + z_power * max(share - delta**2, 0.0) ** 0.5
        return n * delta**2 - needed**2

    if shortfall(1.0) <= 0:
        return 1.0
    return float(brentq(shortfall, 1e-9, 1.0))
