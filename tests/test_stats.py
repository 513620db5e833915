"""Statistics against values worked out by hand, statsmodels and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ratchet import stats


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


def test_bootstrap_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(1000):
        # gains 15%, losses 9%: a true difference of 6 points
        flips = rng.choice([1.0, -1.0, 0.0], size=400, p=[0.15, 0.09, 0.76])
        low, high = stats.bootstrap_mean(flips, seed=trial, resamples=2000)
        covered += low <= 0.06 <= high
    assert 0.935 <= covered / 1000 <= 0.97


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


def test_smallest_detectable_difference_solves_connors_formula() -> None:
    delta = stats.smallest_detectable_difference(1319, 0.2)
    needed = (1.959964 * 0.2**0.5 + 0.841621 * (0.2 - delta**2) ** 0.5) ** 2 / delta**2
    assert needed == pytest.approx(1319, rel=1e-4)
    assert delta == pytest.approx(0.0344, abs=2e-4)
    assert stats.smallest_detectable_difference(3, 0.2) == 1.0
    # no discordance seen: δ = π, so n δ = (1.96 + 0.84 √(1 − δ))²
    tiny = stats.smallest_detectable_difference(100, 0.0)
    assert 100 * tiny == pytest.approx((1.959964 + 0.841621 * (1 - tiny) ** 0.5) ** 2, rel=1e-4)


def test_the_smallest_detectable_difference_is_found_in_four_runs_of_five() -> None:
    n, discordance = 600, 0.25
    delta = stats.smallest_detectable_difference(n, discordance)
    rng = np.random.default_rng(6)
    shares = [(discordance + delta) / 2, (discordance - delta) / 2, 1 - discordance]
    flips = rng.multinomial(n, shares, size=1000)
    found = np.mean([stats.mcnemar_exact(gained, lost) < 0.05 for gained, lost, _ in flips])
    assert 0.75 <= found <= 0.85
