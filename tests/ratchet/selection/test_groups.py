"""Pass rates, live groups and headroom against hand-worked cases and simulation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ratchet.errors import UserError
from ratchet.selection import groups as g
from ratchet.selection.headroom import (
    Action,
    Headroom,
    headroom,
    length_quantiles,
    live_share_of,
    recommend,
)
from ratchet.store.schemas import to_table, write_table


def score_rows(right: dict[str, list[int]]) -> list[dict]:
    """Rows of a scores table; per question one 0/1 per sample."""
    return [
        {
            "question_id": question,
            "sample_index": index,
            "status": "ok" if flag else "parse_failure",
            "extracted": "1",
            "strict": bool(flag) and index % 2 == 0,
            "lenient": bool(flag),
            "truncated": index == 3,
            "num_tokens": 10 + index,
            "reward_exact": float(flag),
        }
        for question, flags in right.items()
        for index, flag in enumerate(flags)
    ]


def write_scores(path: Path, rows: list[dict]) -> Path:
    write_table(path, "scores", to_table("scores", rows))
    return path


RIGHT = {"a": [0, 0, 0, 0], "b": [1, 1, 1, 1], "c": [1, 0, 0, 0], "d": [0, 1, 1, 0]}


@pytest.mark.parametrize("batch_rows", [3, 1000])
def test_groups_are_counted_the_same_in_any_batches(tmp_path: Path, batch_rows: int) -> None:
    found = g.read_groups(write_scores(tmp_path / "scores.parquet", score_rows(RIGHT)), batch_rows)
    counts = dict(zip(found.question_ids.to_pylist(), found.num_lenient_q.tolist(), strict=True))
    assert counts == {"a": 0, "b": 4, "c": 1, "d": 2}
    strict = dict(zip(found.question_ids.to_pylist(), found.num_strict_q.tolist(), strict=True))
    assert strict == {"a": 0, "b": 2, "c": 1, "d": 1}
    assert found.num_samples_q.tolist() == [4, 4, 4, 4]
    assert found.status_counts == {"ok": 7, "parse_failure": 9}
    assert found.num_truncated == 4
    assert found.lengths.tolist() == [0] * 10 + [4, 4, 4]


def test_bad_scores_are_refused(tmp_path: Path) -> None:
    rows = score_rows(RIGHT)
    rows[5]["reward_exact"] = float("nan")
    with pytest.raises(UserError, match="NaN in 'reward_exact'"):
        g.read_groups(write_scores(tmp_path / "nan.parquet", rows))
    rows[5]["reward_exact"] = None
    assert g.read_groups(write_scores(tmp_path / "none.parquet", rows)).num_samples == 16
    rows[5]["lenient"] = None
    with pytest.raises(UserError, match="without 'lenient'"):
        g.read_groups(write_scores(tmp_path / "gap.parquet", rows))
    with pytest.raises(UserError, match="no scores"):
        g.read_groups(write_scores(tmp_path / "empty.parquet", []))


def test_buckets_and_histogram() -> None:
    k, c = np.array([4, 4, 4, 2, 2]), np.array([0, 4, 1, 1, 2])
    assert g.bucket_counts(k, c) == {"always_wrong": 1, "live": 2, "always_right": 2}
    assert g.pass_rate_histogram(k, c) == [1, 1, 1, 0, 2]


def test_live_chance_by_hand() -> None:
    # G=2 of k=4, c=1: mixed pairs are 1·3 of C(4,2)=6; c=2: 4 of 6
    assert g.live_chance([4, 4, 4, 4], [0, 1, 2, 4], 2) == pytest.approx([0, 1 / 2, 2 / 3, 0])
    # G=4 of k=2, c=1: 1 − 2·0.5⁴
    assert g.live_chance([2, 2], [1, 2], 4) == pytest.approx([7 / 8, 0])


def test_live_chance_is_unbiased() -> None:
    from scipy.stats import binom

    c = np.arange(9)
    found = float(binom.pmf(c, 8, 0.3) @ g.live_chance(np.full(9, 8), c, 5))
    assert found == pytest.approx(1 - 0.3**5 - 0.7**5)


def test_live_chance_given_prior_by_hand() -> None:
    # uniform prior, one sample, right: p ~ Beta(2, 1); G=2: 1 − E p² − E (1−p)² = 1 − 1/2 − 1/6
    assert g.live_chance_given_prior([1], [1], 2, (1.0, 1.0)) == pytest.approx([1 / 3])


def test_the_prior_is_recovered_and_selection_does_not_fool_the_estimate() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 1.5, size=20_000)
    k = np.full(len(p), 8)
    c = rng.binomial(8, p)
    a, b = g.fit_prior(k, c)
    assert a == pytest.approx(0.5, abs=0.03)
    assert b == pytest.approx(1.5, abs=0.08)
    chosen = (c > 0) & (c < 8)
    truth = (1 - p**8 - (1 - p) ** 8)[chosen].mean()
    groups = make_groups(k, c, c)
    assert live_share_of(groups, chosen, "lenient", 8) == pytest.approx(truth, abs=0.01)
    assert g.live_chance(k, c, 8)[chosen].mean() == 1.0  # what selection does to the unbiased one


def make_groups(
    k: np.ndarray, lenient: np.ndarray, strict: np.ndarray, unreadable: int = 0, truncated: int = 0
) -> g.Groups:
    import pyarrow as pa

    total = int(k.sum())
    return g.Groups(
        question_ids=pa.array([str(index) for index in range(len(k))]),
        num_samples_q=k,
        num_lenient_q=lenient,
        num_strict_q=strict,
        status_counts={"ok": total - unreadable, "parse_failure": unreadable},
        num_truncated=truncated,
        lengths=np.bincount([20] * 98 + [40, 90]),
        num_of_known_end=total,
    )


def test_headroom_figures() -> None:
    k = np.array([4, 4, 4, 4])
    found = headroom(
        make_groups(k, np.array([0, 4, 1, 2]), np.array([0, 2, 0, 1]), unreadable=4, truncated=2),
        group_size=2,
        solution_share=1.0,
    )
    assert found.pass_at_1_lenient == pytest.approx(7 / 16)
    assert found.pass_at_1_strict == pytest.approx(3 / 16)
    assert found.pass_at_k_lenient == 3 / 4
    assert found.buckets_strict == {"always_wrong": 2, "live": 2, "always_right": 0}
    assert found.live_share == pytest.approx((0 + 0 + 1 / 2 + 2 / 3) / 4)
    assert found.live_share_method.startswith("unbiased")
    assert found.parse_failure_rate == 4 / 16
    assert found.truncated_share == 2 / 16
    assert found.length_quantiles == {"0.5": 20, "0.9": 20, "0.95": 20, "0.99": 40}
    assert found.implied_max_completion_tokens == 48
    assert found.histogram_lenient == [1, 1, 1, 0, 1]


def test_length_quantiles_of_nothing() -> None:
    assert length_quantiles(np.zeros(1, dtype=int)) == {}


def advise(
    lenient: list[int], strict: list[int], *, solutions: float = 1.0, **spoilt: int
) -> Headroom:
    k = np.full(len(lenient), 8)
    groups = make_groups(k, np.array(lenient), np.array(strict), **spoilt)
    return headroom(groups, group_size=8, solution_share=solutions)


def test_recommendations_follow_the_figures() -> None:
    half = [0, 2, 4, 6, 8, 3]
    assert recommend(advise(half, half)).action is Action.GRPO
    assert recommend(advise(half, half, truncated=20)).action is Action.RAISE_LENGTH
    assert recommend(advise(half, [0, 0, 1, 2, 4, 0])).action is Action.FIX_PROMPT
    assert recommend(advise(half, half, unreadable=20)).action is Action.FIX_PROMPT
    assert recommend(advise([8] * 19 + [4], [8] * 19 + [4])).action is Action.NOTHING
    mostly_wrong = [0] * 19 + [1]
    assert recommend(advise(mostly_wrong, mostly_wrong)).action is Action.SFT
    assert recommend(advise(mostly_wrong, mostly_wrong, solutions=0.0)).action is Action.OPD
    reason = recommend(advise(half, [0, 0, 1, 2, 4, 0])).reasons[0]
    assert "1 of the 3 questions that look always wrong" not in reason  # 3 strict, 1 lenient
    assert "2 of the 3 questions" in reason


def test_the_modules_are_light() -> None:
    code = (
        "import sys, ratchet.selection.groups, ratchet.selection.headroom\n"
        "import ratchet.evaluation.stats\n"
        "assert not {'numpy', 'scipy', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
