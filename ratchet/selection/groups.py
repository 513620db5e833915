"""Groups of completions: how often each question is solved, which groups are live, what to do.

A scores table is read in batches and added up with Arrow, so memory grows with the number of
questions, not of samples. What is *estimated*: a pass rate is the share of right samples; the
chance that a group of G is live (holds both right and wrong answers) is 1 − p^G − (1−p)^G, for
which `live_chance` has the unbiased estimate and `live_chance_given_prior` the one that stays
right after questions were selected by their pass rate.

Liveness is judged by the verdict alone. Shaping rewards can make further groups live; what they
teach is format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ratchet.errors import UserError
from ratchet.store.schemas import check_schema

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

BATCH_ROWS = 131_072
MERGE_ROWS = 1_000_000  # partial sums held beside the merged ones before they are merged too
MOST_RATES = 32
"""Pass rates that a histogram tells apart."""
Score = Literal["lenient", "strict"]


class Bucket(StrEnum):
    """What a question's samples say."""

    ALWAYS_WRONG = "always_wrong"
    LIVE = "live"
    ALWAYS_RIGHT = "always_right"


BUCKETS = (Bucket.ALWAYS_WRONG, Bucket.LIVE, Bucket.ALWAYS_RIGHT)


@dataclass(frozen=True)
class Groups:
    """Counts per question (suffix _q, aligned with `question_ids`) and over all samples."""

    question_ids: pa.Array
    num_samples_q: np.ndarray
    num_lenient_q: np.ndarray
    num_strict_q: np.ndarray
    status_counts: dict[str, int]
    """Samples per verifier status."""
    num_truncated: int
    lengths: np.ndarray
    """lengths[t] = samples of t tokens that ended by themselves."""
    num_of_known_end: int
    """Samples of which it is known whether they were truncated: what an earlier run logged may not
    tell."""

    def num_right_q(self, score: Score) -> np.ndarray:
        """Right samples per question under one verdict."""
        return self.num_lenient_q if score == "lenient" else self.num_strict_q

    def pass_rate_q(self, score: Score) -> np.ndarray:
        """Share of right samples per question."""
        return self.num_right_q(score) / self.num_samples_q

    @property
    def num_samples(self) -> int:
        """Samples of all questions."""
        return int(self.num_samples_q.sum())


def _merge(parts: list[pa.Table]) -> pa.Table:
    import pyarrow as pa

    whole = pa.concat_tables(parts).group_by("question_id", use_threads=False)
    counted = whole.aggregate([("samples", "sum"), ("lenient", "sum"), ("strict", "sum")])
    return counted.rename_columns(["question_id", "samples", "lenient", "strict"])


def _check_batch(batch: pa.RecordBatch, rewards: list[str], where: str) -> None:
    import pyarrow.compute as pc

    for column in ("question_id", "lenient", "strict", "status"):
        if batch.column(column).null_count:
            raise UserError(f"{where} has rows without '{column}': score the completions again")
    for column in rewards:
        if pc.any(pc.is_nan(batch.column(column))).as_py():
            raise UserError(
                f"{where} holds NaN in '{column}': a reward must give a number, or None where it "
                "does not apply; mend that reward and score again"
            )


def score_batches(path: Path, batch_rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    """Batches of a scores table with the columns that counting needs, checked for gaps and NaN."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        check_schema(file.schema_arrow, "scores", str(path))
        rewards = [name for name in file.schema_arrow.names if name.startswith("reward_")]
        columns = ["question_id", "lenient", "strict", "status", "truncated", "num_tokens"]
        for batch in file.iter_batches(batch_rows, columns=columns + rewards, use_threads=False):
            _check_batch(batch, rewards, str(path))
            yield batch


def read_groups(path: Path, batch_rows: int = BATCH_ROWS) -> Groups:
    """Count a scores table. UserError for an empty one, missing verdicts or NaN rewards."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[pa.Table] = []
    status_counts: dict[str, int] = {}
    lengths = np.zeros(1, dtype=np.int64)
    num_truncated = num_of_known_end = 0
    for batch in score_batches(path, batch_rows):
        ones = pa.array(np.ones(len(batch), dtype=np.int64))
        flags = [batch.column(name).cast(pa.int64()) for name in ("lenient", "strict")]
        names = ["question_id", "samples", "lenient", "strict"]
        parts.append(_merge([pa.table([batch.column("question_id"), ones, *flags], names)]))
        if sum(map(len, parts[1:])) > MERGE_ROWS:
            parts = [_merge(parts)]
        for item in pc.value_counts(batch.column("status")).to_pylist():
            status_counts[item["values"]] = status_counts.get(item["values"], 0) + item["counts"]
        ended = pc.invert(batch.column("truncated"))
        num_truncated += pc.sum(pc.cast(batch.column("truncated"), pa.int64())).as_py() or 0
        num_of_known_end += len(ended) - ended.null_count
        known = batch.column("num_tokens").filter(ended).drop_null()
        found = np.bincount(known.to_numpy(), minlength=1)
        width = max(len(lengths), len(found))
        lengths = np.pad(lengths, (0, width - len(lengths))) + np.pad(
            found, (0, width - len(found))
        )
    if not parts:
        raise UserError(f"{path} holds no scores: sample some completions first")
    merged = _merge(parts).combine_chunks()
    return Groups(
        question_ids=merged.column("question_id").combine_chunks(),
        num_samples_q=merged.column("samples").to_numpy(),
        num_lenient_q=merged.column("lenient").to_numpy(),
        num_strict_q=merged.column("strict").to_numpy(),
        status_counts=dict(sorted(status_counts.items())),
        num_truncated=num_truncated,
        lengths=lengths,
        num_of_known_end=num_of_known_end,
    )


def bucket_codes(num_samples_q: np.ndarray, num_right_q: np.ndarray) -> np.ndarray:
    """Index into `BUCKETS` per question."""
    return 1 + (num_right_q == num_samples_q).astype(int) - (num_right_q == 0).astype(int)


def bucket_counts(num_samples_q: np.ndarray, num_right_q: np.ndarray) -> dict[str, int]:
    """Questions per bucket."""
    import numpy as np

    counts = np.bincount(bucket_codes(num_samples_q, num_right_q), minlength=3)
    return {bucket.value: int(count) for bucket, count in zip(BUCKETS, counts, strict=True)}


def pass_rate_histogram(num_samples_q: np.ndarray, num_right_q: np.ndarray) -> list[int]:
    """Questions per pass rate 0, 1/k, …, 1 for the largest k up to `MOST_RATES`. Other rates go to
    the nearest, but 0 and 1 hold only questions that are always wrong and always right."""
    import numpy as np

    k = min(int(num_samples_q.max()), MOST_RATES)
    nearest_q = np.rint(num_right_q / num_samples_q * k).astype(int)
    mixed_q = (num_right_q > 0) & (num_right_q < num_samples_q)
    rate_q = np.where(mixed_q, np.clip(nearest_q, 1, max(k - 1, 1)), nearest_q)
    return np.bincount(rate_q, minlength=k + 1).tolist()


def live_chance(num_samples_q: np.ndarray, num_right_q: np.ndarray, group_size: int) -> np.ndarray:
    """Chance that G new completions of a question are neither all right nor all wrong.

    From k ≥ G samples of which c are right the unbiased estimate 1 − C(c,G)/C(k,G) −
    C(k−c,G)/C(k,G), the share of mixed sets of G among the k. From fewer no unbiased estimate
    exists (the quantity has degree G in p); then p = c/k is put in, which understates on average
    because 1 − p^G − (1−p)^G is concave. Right for all questions together; not for a part of them
    chosen by c, see `live_chance_given_prior`.
    """
    import numpy as np
    from scipy.stats import hypergeom

    k, c = np.asarray(num_samples_q), np.asarray(num_right_q)
    plugged = 1 - (c / k) ** group_size - (1 - c / k) ** group_size
    enough = np.maximum(k, group_size)  # keeps hypergeom defined where it isn't used
    same = hypergeom.pmf(0, enough, c, group_size) + hypergeom.pmf(
        0, enough, np.maximum(k - c, 0), group_size
    )
    return np.where(k >= group_size, 1 - same, plugged)


def fit_prior(num_samples_q: np.ndarray, num_right_q: np.ndarray) -> tuple[float, float]:
    """Beta distribution (a, b) of true pass rates over questions, by maximum likelihood.

    Counts are beta-binomial under it. a and b are kept within 0.005 … 200, which also covers
    questions that are all right or all wrong.
    """
    import numpy as np
    from scipy.optimize import minimize
    from scipy.stats import betabinom

    width = int(num_samples_q.max()) + 1  # a pair of counts as one number
    pairs, weight = np.unique(num_samples_q * width + num_right_q, return_counts=True)
    k, c = np.divmod(pairs, width)

    def loss(log_ab: np.ndarray) -> float:
        a, b = np.exp(log_ab)
        return float(-(weight * betabinom.logpmf(c, k, a, b)).sum() / weight.sum())

    bounds = [(np.log(0.005), np.log(200.0))] * 2
    a, b = np.exp(minimize(loss, np.zeros(2), bounds=bounds, method="L-BFGS-B").x)
    return float(a), float(b)


def live_chance_given_prior(
    num_samples_q: np.ndarray, num_right_q: np.ndarray, group_size: int, prior: tuple[float, float]
) -> np.ndarray:
    """Expected chance of a live group given a question's own counts and the prior of all questions.

    With p ~ Beta(a + c, b + k − c) the mean of p^G is B(a+c+G, b+k−c) / B(a+c, b+k−c). Unlike
    `live_chance` it isn't fooled by selection: questions kept *because* they had mixed samples
    were partly lucky, and are shrunk towards the rest. For any k and G.
    """
    import numpy as np
    from scipy.special import betaln

    a = prior[0] + np.asarray(num_right_q)
    b = prior[1] + np.asarray(num_samples_q) - np.asarray(num_right_q)
    base = betaln(a, b)
    return 1 - np.exp(betaln(a + group_size, b) - base) - np.exp(betaln(a, b + group_size) - base)
