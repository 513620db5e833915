"""Pass rates before and after training, from whichever samples can be compared honestly.

Best are samples of the first and the last variant on held-out questions: nobody trained on them and
both variants drew alike. Without those (`evaluate.samples = 0`) the groups of RL's last steps are
set beside what was sampled of the same questions before; those were trained on, and the title says
so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ratchet.store.store import Artifact

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

EDGE_SHARE = 0.1
"""Share of RL's steps that count as the last ones."""
MOST_BARS = 8
"""Pass rates in up to so many steps get a bar each; finer ones share six."""
SHARED = ("0", "to 1/4", "to 1/2", "to 3/4", "below 1", "1")


@dataclass(frozen=True)
class PassRates:
    """Strict pass rates of questions before and after."""

    held_out: bool
    """Whether the questions are held-out ones, sampled by both variants; else training
    questions."""
    what: str
    """The benchmark, or the steps that the rollouts are from."""
    before_q: np.ndarray
    """Right samples as a share, per question."""
    after_q: np.ndarray
    """The same, per question, or per group of rollouts (a question may come twice)."""
    k_before: int
    k_after: int


def _rates(table: pa.Table, names: list[str]) -> pa.Table:
    """Mean of 'strict' and number of rows for each combination of `names`."""
    import pyarrow.compute as pc

    numbers = table.append_column("right", pc.cast(table.column("strict"), "float64"))
    return numbers.group_by(names).aggregate([("right", "mean"), ("right", "count")])


def held_out(first: Artifact, last: Artifact) -> PassRates | None:
    """From the sampled answers of two evaluations on the first benchmark; None without any."""
    import pyarrow.compute as pc

    found = []
    name = ""
    for artifact in (first, last):
        table = artifact.table("eval", ["question_id", "benchmark", "decoding", "strict"])
        table = table.filter(pc.equal(table.column("decoding"), "sampled"))
        if not len(table):
            return None
        name = table.column("benchmark")[0].as_py()
        table = table.filter(pc.equal(table.column("benchmark"), name))
        found.append(_rates(table, ["question_id"]))
    ks = [int(table.column("right_count")[0].as_py()) for table in found]
    before, after = (table.column("right_mean").to_numpy() for table in found)
    return PassRates(True, name, before, after, *ks)


def rollouts(scores: Artifact, grpo: Artifact) -> PassRates | None:
    """From the groups of RL's last steps and the samples of their questions before training."""
    import pyarrow.compute as pc

    drawn = grpo.table("rollouts", ["step", "question_id", "strict"])
    if not len(drawn):
        return None
    steps = sorted(pc.unique(drawn.column("step")).to_pylist())
    last = steps[-max(1, round(len(steps) * EDGE_SHARE)) :]
    drawn = drawn.filter(pc.greater_equal(drawn.column("step"), last[0]))
    after = _rates(drawn, ["step", "question_id"])
    sampled = scores.table("scores", ["question_id", "strict"])
    ids = pc.unique(drawn.column("question_id"))
    before = _rates(sampled.filter(pc.is_in(sampled.column("question_id"), ids)), ["question_id"])
    if not len(before):
        return None
    return PassRates(
        False,
        f"steps {last[0]} to {last[-1]}" if len(last) > 1 else f"step {last[0]}",
        before.column("right_mean").to_numpy(),
        after.column("right_mean").to_numpy(),
        int(before.column("right_count")[0].as_py()),
        int(after.column("right_count")[0].as_py()),
    )


def pass_rates_of(inputs: Mapping[str, Artifact], variants: list[str]) -> PassRates | None:
    """Held-out samples where the run has them, else RL's rollouts beside the presamples, if there
    are any."""
    first, last = (inputs[f"evaluate.{variant}"] for variant in (variants[0], variants[-1]))
    found = held_out(first, last)
    if found is None and "score" in inputs:
        found = rollouts(inputs["score"], inputs["grpo"])
    return found


def histogram(rates: PassRates) -> tuple[list[str], list[float], list[float]]:
    """(labels, shares before, shares after): a bar per pass rate where both have the same few."""
    import numpy as np

    k = rates.k_before
    if k == rates.k_after and k <= MOST_BARS:
        labels = [f"{i}/{k}" for i in range(k + 1)]

        def place(rate_q: np.ndarray) -> np.ndarray:
            return np.rint(rate_q * k).astype(int)

    else:
        labels = list(SHARED)
        edges = [float(Fraction(i, 4)) for i in range(1, 4)]

        def place(rate_q: np.ndarray) -> np.ndarray:
            inside = 1 + np.searchsorted(edges, rate_q, side="left")
            return np.where(rate_q <= 0, 0, np.where(rate_q >= 1, 5, inside))

    before, after = (
        (np.bincount(place(rate_q), minlength=len(labels)) / len(rate_q)).tolist()
        for rate_q in (rates.before_q, rates.after_q)
    )
    return labels, before, after
