"""What training can gain, judged from samples drawn before it, and what to do first.

`headroom` sums a scores table up into the figures that decide; `recommend` turns them into one
action with its reasons. The thresholds below are rules of thumb, stated in every reason so that
the reader can disagree with them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ratchet.selection.groups import (
    Groups,
    Score,
    bucket_counts,
    fit_prior,
    live_chance,
    live_chance_given_prior,
    pass_rate_histogram,
)
from ratchet.words import percent

if TYPE_CHECKING:
    import numpy as np

MANY_TRUNCATED = 0.2  # share of completions cut off
MOSTLY_FORMAT = 0.5  # strict pass@1 below this share of the lenient one
MANY_UNREADABLE = 0.3  # share of completions without a readable answer
SOLVED = 0.9  # share of questions always right
FEW_LIVE = 0.2  # expected share of live groups
LENGTH_QUANTILES = (0.5, 0.9, 0.95, 0.99)
LENGTH_STEP = 16  # tokens a suggested limit is rounded up to


class Action(StrEnum):
    """What to do before spending device-hours on RL."""

    RAISE_LENGTH = "raise the length limit"
    FIX_PROMPT = "fix the prompt"
    SFT = "warm up by SFT"
    OPD = "warm up by OPD"
    GRPO = "straight to GRPO"
    NOTHING = "nothing to gain"


@dataclass(frozen=True)
class Headroom:
    """Figures of one model on one set of questions; shares are 0 to 1."""

    num_questions: int
    num_samples: int
    k: int
    """Most samples of a question."""
    fewest: int
    """Fewest samples of a question."""
    pass_at_1_lenient: float
    pass_at_1_strict: float
    pass_at_k_lenient: float
    """Share of questions with at least one right sample."""
    pass_at_k_strict: float
    buckets_lenient: dict[str, int]
    buckets_strict: dict[str, int]
    histogram_lenient: list[int]
    """Questions per pass rate 0, 1/k, …, 1."""
    histogram_strict: list[int]
    group_size: int
    live_share: float
    """Expected share of live groups over all questions, by the lenient verdict."""
    live_share_method: str
    parse_failure_rate: float
    truncated_share: float | None
    """None where it isn't known, as in what an earlier run logged."""
    length_quantiles: dict[str, int]
    """Tokens of the completions that ended by themselves."""
    implied_max_completion_tokens: int
    """99% of those fit, rounded up."""
    solution_share: float
    """Share of questions with a reference solution to learn from."""

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Recommendation:
    """One action and why."""

    action: Action
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"action": self.action.value, "reasons": list(self.reasons)}


def live_share(groups: Groups, score: Score, group_size: int) -> tuple[float, str]:
    """Expected share of live groups over all questions, and what kind of estimate it is."""
    k, c = groups.num_samples_q, groups.num_right_q(score)
    if (k >= group_size).all():
        method = f"unbiased, from at least {group_size} samples of every question"
    else:
        method = (
            f"from {k.min()} samples of a question for groups of {group_size}: the pass rate is "
            "put into 1 − p^G − (1−p)^G, which understates"
        )
    return float(live_chance(k, c, group_size).mean()), method


def live_share_of(groups: Groups, chosen_q: np.ndarray, score: Score, group_size: int) -> float:
    """Expected share of live groups over chosen questions (mask), selection allowed for."""
    k, c = groups.num_samples_q, groups.num_right_q(score)
    chance = live_chance_given_prior(k[chosen_q], c[chosen_q], group_size, fit_prior(k, c))
    return float(chance.mean())


def length_quantiles(lengths: np.ndarray) -> dict[str, int]:
    """Quantiles of a histogram of lengths (lengths[t] = samples of t tokens); empty without any."""
    import numpy as np

    total = lengths.sum()
    if not total:
        return {}
    reached = np.cumsum(lengths) / total
    return {f"{q:g}": int(np.searchsorted(reached, q - 1e-12)) for q in LENGTH_QUANTILES}


def headroom(groups: Groups, group_size: int, solution_share: float) -> Headroom:
    """Figures of a counted scores table; `solution_share` of its questions have a solution."""
    k = groups.num_samples_q
    lenient, strict = groups.num_lenient_q, groups.num_strict_q
    share, method = live_share(groups, "lenient", group_size)
    quantiles = length_quantiles(groups.lengths)
    longest = quantiles.get("0.99", 0)
    return Headroom(
        num_questions=len(k),
        num_samples=groups.num_samples,
        k=int(k.max()),
        fewest=int(k.min()),
        pass_at_1_lenient=float((lenient / k).mean()),
        pass_at_1_strict=float((strict / k).mean()),
        pass_at_k_lenient=float((lenient > 0).mean()),
        pass_at_k_strict=float((strict > 0).mean()),
        buckets_lenient=bucket_counts(k, lenient),
        buckets_strict=bucket_counts(k, strict),
        histogram_lenient=pass_rate_histogram(k, lenient),
        histogram_strict=pass_rate_histogram(k, strict),
        group_size=group_size,
        live_share=share,
        live_share_method=method,
        parse_failure_rate=groups.status_counts.get("parse_failure", 0) / groups.num_samples,
        truncated_share=groups.num_truncated / groups.num_of_known_end
        if groups.num_of_known_end
        else None,
        length_quantiles=quantiles,
        implied_max_completion_tokens=-(-longest // LENGTH_STEP) * LENGTH_STEP,
        solution_share=solution_share,
    )


def num_samples_words(found: Headroom) -> str:
    """How many samples each question has: '8', or '8 to 40'."""
    return f"{found.k}" if found.k == found.fewest else f"{found.fewest} to {found.k}"


def pass_at_k_words(found: Headroom) -> str:
    """What `pass_at_k_lenient` is: 'pass@8', which it isn't where some questions have fewer
    samples."""
    if found.k == found.fewest:
        return f"pass@{found.k}"
    return f"solved at least once in {num_samples_words(found)} samples"


def _format_reasons(found: Headroom) -> list[str]:
    """Why the format and not the maths is what fails; empty when it isn't."""
    reasons = []
    if found.pass_at_1_strict < MOSTLY_FORMAT * found.pass_at_1_lenient:
        saved = found.buckets_strict["always_wrong"] - found.buckets_lenient["always_wrong"]
        reasons.append(
            f"only {percent(found.pass_at_1_strict)} of completions are right in the demanded "
            f"format, {percent(found.pass_at_1_lenient)} are right in any: {saved:,} of the "
            f"{found.buckets_strict['always_wrong']:,} questions that look always wrong fail by "
            "format alone"
        )
    if found.parse_failure_rate > MANY_UNREADABLE:
        reasons.append(
            f"no answer can be read in {percent(found.parse_failure_rate)} of the completions "
            f"(limit {percent(MANY_UNREADABLE)})"
        )
    return reasons


def _warm_up(found: Headroom) -> Recommendation:
    why = (
        f"only {percent(found.live_share)} of groups of {found.group_size} would hold both right "
        f"and wrong answers (below {percent(FEW_LIVE)}), the others give no gradient"
    )
    if found.solution_share >= 0.5:
        return Recommendation(
            Action.SFT,
            (
                why,
                f"{percent(found.solution_share)} of the questions have a reference solution to "
                "learn from; distillation from a larger model with the same tokenizer is the "
                "stronger choice where one is at hand",
            ),
        )
    return Recommendation(
        Action.OPD,
        (why, f"only {percent(found.solution_share)} of the questions have a reference solution"),
    )


def recommend(found: Headroom) -> Recommendation:
    """The first thing to do, by the first rule that applies.

    Cut-off completions are looked at before the format, the format before the maths: each would
    make the next figure meaningless.
    """
    solved = found.buckets_lenient["always_right"] / found.num_questions
    if found.truncated_share is not None and found.truncated_share > MANY_TRUNCATED:
        return Recommendation(
            Action.RAISE_LENGTH,
            (
                f"{percent(found.truncated_share)} of the completions were cut off (limit "
                f"{percent(MANY_TRUNCATED)}), so what they would have answered is unknown",
            ),
        )
    if (reasons := _format_reasons(found)) and found.pass_at_1_strict < SOLVED:
        return Recommendation(
            Action.FIX_PROMPT,
            (*reasons, "another prompt format costs nothing; compare them with the benchmark"),
        )
    if solved >= SOLVED:
        return Recommendation(
            Action.NOTHING,
            (
                f"{percent(solved)} of the questions are always right in "
                f"{num_samples_words(found)} samples",
            ),
        )
    if found.live_share < FEW_LIVE:
        return _warm_up(found)
    return Recommendation(
        Action.GRPO,
        (
            f"{percent(found.live_share)} of groups of {found.group_size} would be live and give "
            "a gradient",
            f"pass@1 is {percent(found.pass_at_1_lenient)}, {pass_at_k_words(found)} "
            f"{percent(found.pass_at_k_lenient)}: the right answers are within reach of sampling",
        ),
    )
