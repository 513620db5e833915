"""Statistics against values worked out by hand, statsmodels and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ratchet.evaluation import stats


def test_wilson_matches_the_closed_form_and_statsmodels() -> None:
    from statsmodels.stats.proportion import proportion_confint

    # centre = (8/10 + z²/20) / (1 + z²/10), z = 1.959964: 0.4902 and 0.9433
    low, high = stats.wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    for successes, n, confidence in [(0, 7, 0.95), (7, 7, 0.9), (517, 1319, 0.99)]:
        expected = proportion_confint(successes, n, 1 - confidence, method="wilson")
        assert stats.wilson(successes, n, confidence) == pytest.approx(expected, abs=1e-12)


def test_wilson_refuses_no_observations() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stats.wilson(0, 0)


def test_mcnemar_is_the_two_sided_sign_test() -> None:
    from statsmodels.stats.contingency_tables import mcnemar

    # 10 flips, 9 of them gains: 2 · (C(10,9) + C(10,10)) / 2¹⁰ = 22/1024
    assert stats.mcnemar_exact(9, 1) == pytest.approx(22 / 1024)
    assert stats.mcnemar_exact(0, 0) == 1.0
    assert stats.mcnemar_exact(5, 5) == 1.0
    expected = mcnemar([[100, 37], [18, 50]], exact=True).pvalue
    assert stats.mcnemar_exact(18, 37) == pytest.approx(expected)


def test_tango_matches_the_published_interval_and_has_a_width_without_flips() -> None:
    # Fagerland, Lydersen and Laake (2014), airway data: 1 against 7 of 21, −0.517 to −0.026
    low, high = stats.tango(1, 7, 21)
    assert (round(low, 3), round(high, 3)) == (-0.517, -0.026)
    assert stats.tango(7, 1, 21) == pytest.approx((-high, -low))
    # nothing flipped: n δ / (1 − δ) = z², so δ = z² / (n + z²)
    assert stats.tango(0, 0, 100) == pytest.approx((-3.841459 / 103.841459, 3.841459 / 103.841459))
    assert stats.tango(5, 0, 5)[1] == 1.0
    assert stats.tango(0, 5, 5)[0] == -1.0
    with pytest.raises(ValueError, match="no flips of 5"):
        stats.tango(4, 2, 5)


def test_tango_ends_where_the_score_test_begins_to_reject() -> None:
    # The likeliest chance of a loss given the difference, found by a general optimiser.
    from scipy.optimize import minimize_scalar

    gained, lost, n = 31, 12, 240
    for delta, sign in zip(stats.tango(gained, lost, n), (1, -1), strict=True):

        def unlikely(q: float, delta: float = delta) -> float:
            rest = n - gained - lost
            chances = (q + delta, q, 1 - 2 * q - delta)
            return -sum(k * math.log(p) for k, p in zip((gained, lost, rest), chances, strict=True))

        low = max(0.0, -delta) + 1e-9
        q = minimize_scalar(
            unlikely, bounds=(low, (1 - delta) / 2 - 1e-9), method="bounded",
            options={"xatol": 1e-10},
        ).x  # fmt: skip
        score = (gained - lost - n * delta) / math.sqrt(n * (2 * q + delta * (1 - delta)))
        assert score == pytest.approx(sign * 1.959964, abs=1e-4)


def test_wilson_for_means_is_wilson_for_ones_and_zeros_up_to_the_quantile() -> None:
    from scipy.stats import t

    ones = [1.0] * 517 + [0.0] * 802
    level = 2 * t.cdf(1.9599639845400545, 1318) - 1  # so that t's quantile is 1.96
    assert stats.wilson_mean(ones, level) == pytest.approx(stats.wilson(517, 1319), abs=1e-9)
    # v = 0.375, s = 0.125: 80 · 0.375 · 0.625 / 0.015625 = 1200 effective questions, t₇₉ = 1.9905
    assert stats.wilson_mean(np.repeat([[0.5, 0.25]], 40, 0).ravel()) == pytest.approx(
        (0.3476, 0.4032), abs=1e-4
    )
    # no failure at all: n questions at most, t² / (n + t²) for the width
    low, high = stats.wilson_mean([1.0] * 50)
    assert (low, high) == (pytest.approx(50 / (50 + t.ppf(0.975, 49) ** 2)), 1.0)
    with pytest.raises(ValueError, match="0, 1"):
        stats.wilson_mean([0.5, 1.5])


def test_paired_bootstrap_agrees_with_the_normal_interval_and_is_seeded() -> None:
    rng = np.random.default_rng(3)
    a = rng.random(2000) < 0.5
    b = np.where(rng.random(2000) < 0.2, ~a, a)
    difference = b.astype(float) - a
    half = 1.959964 * difference.std() / math.sqrt(2000)
    low, high = stats.paired_bootstrap(a, b, seed=1)
    assert low == pytest.approx(difference.mean() - half, abs=0.0015)
    assert high == pytest.approx(difference.mean() + half, abs=0.0015)
    assert stats.paired_bootstrap(a, b, seed=1) == (low, high)
    assert stats.change_interval(difference) == stats.tango(
        int((difference > 0).sum()), int((difference < 0).sum()), 2000
    )
    assert stats.change_interval(difference / 2, seed=1) == pytest.approx((low / 2, high / 2))


def test_paired_bootstrap_keeps_samples_with_their_question() -> None:
    # Ten copies of a question's one outcome carry no more information than one of them.
    rng = np.random.default_rng(4)
    a, b = rng.random(300) < 0.4, rng.random(300) < 0.5
    copies_a, copies_b = np.repeat(a[:, None], 10, 1), np.repeat(b[:, None], 4, 1)
    assert stats.paired_bootstrap(copies_a, copies_b, seed=2) == stats.paired_bootstrap(
        a, b, seed=2
    )


def test_paired_bootstrap_refuses_different_questions_and_nan() -> None:
    with pytest.raises(ValueError, match="3 questions"):
        stats.paired_bootstrap([0, 1, 1], [1, 0])
    with pytest.raises(ValueError, match="finite"):
        stats.bootstrap_mean([0.0, math.nan])
    with pytest.raises(ValueError, match="one value per question"):
        stats.bootstrap_mean([])


# Coverage of nominal 95% intervals. For proportions and flips it is computed, not simulated: the
# chance of every possible count times whether its interval holds the truth.
BOUNDS = (0.94, 0.965)


@pytest.mark.parametrize("n", [100, 400, 1319])
def test_coverage_of_wilson(n: int) -> None:
    from scipy.stats import binom

    low, high = np.array([stats.wilson(k, n) for k in range(n + 1)]).T

    def coverage(p: float) -> float:
        return float(binom.pmf(np.arange(n + 1), n, p) @ ((low <= p) & (p <= high)))

    # With 101 possible counts no interval covers evenly: there it is right over the accuracies.
    over_all = np.mean([coverage(p) for p in np.linspace(0.05, 0.95, 400)])
    assert BOUNDS[0] <= over_all <= BOUNDS[1]
    for p in (0.1, 0.3, 0.5, 0.65, 0.8, 0.9) if n >= 400 else ():
        assert BOUNDS[0] <= coverage(p) <= BOUNDS[1], p


@pytest.mark.parametrize(
    ("n", "flips", "gain"),
    [
        (100, 0.1, 0.0), (100, 0.2, 0.06), (100, 0.4, 0.03), (200, 0.1, 0.06), (200, 0.2, 0.0),
        (400, 0.03, 0.0), (400, 0.03, 0.03), (400, 0.1, 0.06), (400, 0.6, 0.5), (1319, 0.1, 0.06),
    ],
)  # fmt: skip
def test_coverage_of_tango(n: int, flips: float, gain: float) -> None:
    from scipy.stats import binom

    covered = total = 0.0
    for num in range(n + 1):
        chance = binom.pmf(num, n, flips)
        if chance < 1e-4:
            continue
        for gained in range(num + 1):
            weight = chance * binom.pmf(gained, num, (flips + gain) / 2 / flips)
            if weight < 1e-5:
                continue
            low, high = stats.tango(gained, num - gained, n)
            covered += weight * (low <= gain <= high)
            total += weight
    assert total > 0.98
    assert BOUNDS[0] <= covered / total <= BOUNDS[1]


def simulated(rng: np.random.Generator, a: float, b: float, shape: tuple[int, int]) -> np.ndarray:
    """Right answers of 8 samples, the questions' pass rates drawn from Beta(a, b)."""
    return rng.binomial(8, rng.beta(a, b, shape))


@pytest.mark.parametrize("n", [100, 400])
@pytest.mark.parametrize(("a", "b"), [(0.5, 1.5), (0.3, 3.0), (1.0, 1.0)])
def test_coverage_of_means_and_of_pass_at_k(n: int, a: float, b: float) -> None:
    right_tq = simulated(np.random.default_rng(11), a, b, (4000, n))
    # E(1 − p) over Beta(a, b) to the fourth: the product of (b + i) / (a + b + i)
    never = math.prod((b + i) / (a + b + i) for i in range(4))
    table = stats.pass_at_k(np.full(9, 8), np.arange(9), 4)
    for values_tq, truth in ((right_tq / 8, a / (a + b)), (table[right_tq], 1 - never)):
        ends = np.array([stats.wilson_mean(values) for values in values_tq])
        covered = np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
        assert BOUNDS[0] <= covered <= BOUNDS[1]


def test_near_the_ceiling_an_interval_is_rather_too_wide_than_too_narrow() -> None:
    right_tq = simulated(np.random.default_rng(12), 2.0, 0.4, (2000, 200))
    table = stats.pass_at_k(np.full(9, 8), np.arange(9), 4)
    truth = 1 - math.prod((0.4 + i) / (2.4 + i) for i in range(4))
    ends = np.array([stats.wilson_mean(table[right_q]) for right_q in right_tq])
    assert np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1])) >= 0.94


def test_coverage_of_the_paired_bootstrap_over_nested_samples() -> None:
    rng = np.random.default_rng(13)
    covered, trials = 0, 3000
    for trial in range(trials):
        p = rng.beta(0.5, 1.5, 200)
        better = p + 0.3 * (1 - p) * 0.25  # 0.3 × 0.25 of what was missing: 5.625 points
        change = (rng.binomial(4, better) - rng.binomial(4, p)) / 4
        low, high = stats.bootstrap_mean(change, seed=trial, resamples=1500)
        covered += low <= 0.075 * 0.75 <= high
    assert BOUNDS[0] <= covered / trials <= BOUNDS[1]


def test_a_difference_of_independent_estimates_by_hand() -> None:
    # Newcombe (1998): 56/70 against 48/80, 0.2 with 0.0524 to 0.3339
    a, b = (48 / 80, *stats.wilson(48, 80)), (56 / 70, *stats.wilson(56, 70))
    assert stats.difference_interval(a, b) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_coverage_of_a_difference_of_gains() -> None:
    rng = np.random.default_rng(14)
    shares = {400: (0.20, 0.08, 0.72), 200: (0.12, 0.10, 0.78)}  # true gains 12 and 2 points
    drawn = {n: rng.multinomial(n, chances, 3000) for n, chances in shares.items()}
    covered = 0
    for many, few in zip(drawn[400], drawn[200], strict=True):
        seen, new = (
            ((gained - lost) / n, *stats.tango(gained, lost, n))
            for n, (gained, lost, _) in ((400, many), (200, few))
        )
        _, low, high = stats.difference_interval(new, seen)
        covered += low <= 0.10 <= high
    assert BOUNDS[0] <= covered / 3000 <= BOUNDS[1]


def test_holm_by_hand() -> None:
    # smallest × 3, next × 2, largest × 1, never below the one before
    assert stats.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert stats.holm([]) == []


def test_consensus_by_hand() -> None:
    # answers a a b c, a right: of the four runs of two, aa is right, ab and ca tie, bc is wrong
    ballots, right = [[0, 0, 1, 2]], [[True, True, False, False]]
    assert stats.cons_at_k(ballots, right, 4) == pytest.approx([1.0])
    assert stats.cons_at_k(ballots, right, 2) == pytest.approx([(1 + 0.5 + 0 + 0.5) / 4])
    assert stats.cons_at_k(ballots, right, 1) == pytest.approx([0.5])
    # unread answers cast no vote: one right against one wrong, and nothing at all
    unread = [[0, 1, -1, -1], [-1, -1, -1, -1]]
    assert stats.cons_at_k(unread, [[1, 0, 0, 0], [0, 0, 0, 0]], 4) == pytest.approx([0.5, 0.0])
    # b b b against a a: the majority is wrong though pass@5 is certain
    assert stats.cons_at_k([[1, 0, 1, 0, 1]], [[0, 1, 0, 1, 0]], 5) == pytest.approx([0.0])
    with pytest.raises(ValueError, match="cons@5"):
        stats.cons_at_k(ballots, right, 5)


def test_pass_at_k_by_hand() -> None:
    # n=4, c=1, k=2: 1 − C(3,2)/C(4,2) = 1 − 3/6; c=3: only two wrong never fill… C(1,2)=0
    found = stats.pass_at_k([4, 4, 4, 4, 4], [0, 1, 2, 3, 4], 2)
    assert found == pytest.approx([0, 1 / 2, 5 / 6, 1, 1])
    assert stats.pass_at_k([8], [3], 1) == pytest.approx([3 / 8])
    with pytest.raises(ValueError, match="pass@9"):
        stats.pass_at_k([8], [3], 9)


def test_pass_at_k_is_unbiased() -> None:
    # E over c ~ Binomial(8, 0.3) of the estimate is exactly 1 − 0.7⁴
    from scipy.stats import binom

    c = np.arange(9)
    expected = float(binom.pmf(c, 8, 0.3) @ stats.pass_at_k(np.full(9, 8), c, 4))
    assert expected == pytest.approx(1 - 0.7**4)


def test_the_power_of_mcnemar_by_hand() -> None:
    # 6 questions, all flip: significant are 6 of 6 only (2/64); 0.9⁶ + 0.1⁶ when 90% are gains
    assert stats.mcnemar_power(6, 1.0, 0.8) == pytest.approx(0.9**6 + 0.1**6)
    assert stats.mcnemar_power(5, 1.0, 1.0) == 0.0
    assert stats.mcnemar_power(50, 0.0, 0.0) == 0.0


def test_the_smallest_detectable_difference_is_near_connors_formula_and_above_it() -> None:
    # n δ² = (z_α √π + z_β √(π − δ²))² (Connor 1987) is for the test without its exactness
    for n, share in [(200, 0.1), (400, 0.3), (1319, 0.05), (1319, 0.2), (1319, 0.5)]:
        delta = stats.smallest_detectable_difference(n, share)
        needed = (1.959964 * share**0.5 + 0.841621 * (share - delta**2) ** 0.5) ** 2 / delta**2
        assert 0.9 * n <= needed <= n
        assert stats.mcnemar_power(n, share, delta) == pytest.approx(0.8, abs=1e-3)
    assert stats.smallest_detectable_difference(3, 0.2) == 1.0
    with pytest.raises(ValueError, match="discordance"):
        stats.smallest_detectable_difference(10, 1.5)


def test_the_smallest_detectable_difference_is_found_in_four_runs_of_five() -> None:
    n, discordance = 600, 0.25
    delta = stats.smallest_detectable_difference(n, discordance)
    rng = np.random.default_rng(6)
    shares = [(discordance + delta) / 2, (discordance - delta) / 2, 1 - discordance]
    flips = rng.multinomial(n, shares, size=2000)
    found = np.mean([stats.mcnemar_exact(gained, lost) < 0.05 for gained, lost, _ in flips])
    assert 0.78 <= found <= 0.82
