"""Choose the questions that RL trains on, and say why for each one.

Kept: questions whose pass rate lies between the bounds of `filter`, less a seeded `warmup_share` of
them, and a seeded `easy_share` of the always-right ones. The others warm the model up if they have
a reference solution (those held back: in any case) and are dropped otherwise, so the two phases of
training never share a question. The stage stops with the headroom in its message when nothing is
left to learn.

Scores are counted in batches and selected as arrays: memory follows the number of questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.run import FilterConfig, GrpoConfig
from ratchet.errors import UserError
from ratchet.selection.groups import BUCKETS, Bucket, Groups, bucket_codes, read_groups
from ratchet.selection.headroom import (
    Headroom,
    Recommendation,
    headroom,
    live_share_of,
    num_samples_words,
    pass_at_k_words,
    recommend,
)
from ratchet.store.schemas import check_schema
from tasks.runtime.context import StageContext, StageResult

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


class Role(StrEnum):
    """What a question is used for."""

    RL = "rl"
    WARMUP = "warmup"
    DROPPED = "dropped"


ROLES = (Role.RL, Role.WARMUP, Role.DROPPED)
UNSEEN = "unseen"
"""Bucket of questions that the rollouts of an earlier run tell nothing about."""
EASY = "one of the always-right questions kept on purpose"


@dataclass(frozen=True)
class Selection:
    """Role and reason per question, aligned with the counted groups."""

    role_q: np.ndarray
    """Index into `ROLES`."""
    easy_q: np.ndarray
    """Always-right questions kept on purpose."""

    def count(self, role: Role) -> int:
        """Questions of one role."""
        return int((self.role_q == ROLES.index(role)).sum())


def training_questions(path: Path) -> tuple[pa.Array, np.ndarray]:
    """(ids, has a reference solution) of the training questions, in the table's order."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    ids, solved = [], []
    with pq.ParquetFile(path) as file:
        check_schema(file.schema_arrow, "questions", str(path))
        columns = ["question_id", "role", "reference_solution"]
        for batch in file.iter_batches(columns=columns, use_threads=False):
            batch = batch.filter(pc.equal(batch.column("role"), "train"))
            ids.append(batch.column("question_id"))
            solution = pc.fill_null(batch.column("reference_solution"), "")
            solved.append(pc.greater(pc.utf8_length(solution), 0).to_numpy(zero_copy_only=False))
    return pa.chunked_array(ids, pa.string()).combine_chunks(), np.concatenate(solved)


def align(groups: Groups, question_ids: pa.Array, *, partial: bool) -> np.ndarray:
    """Row of `groups` for each training question; −1 for one without scores, which only a
    `partial` table of scores may leave out.

    UserError when questions have no scores or scores have no question.
    """
    import pyarrow.compute as pc

    rows = pc.index_in(question_ids, value_set=groups.question_ids)
    if rows.null_count and not partial:
        raise UserError(
            f"{rows.null_count:,} of {len(question_ids):,} training questions have no scores: "
            "sample and score them first"
        )
    extra = len(groups.question_ids) - (len(question_ids) - rows.null_count)
    if extra:
        raise UserError(
            f"the scores hold {extra:,} questions that are not in the training set: scores and "
            "questions come from different runs"
        )
    return pc.fill_null(rows, -1).to_numpy()


def reorder(groups: Groups, rows: np.ndarray) -> Groups:
    """The same groups with questions in the order of `rows`."""
    import pyarrow as pa

    return Groups(
        question_ids=groups.question_ids.take(pa.array(rows)),
        num_samples_q=groups.num_samples_q[rows],
        num_lenient_q=groups.num_lenient_q[rows],
        num_strict_q=groups.num_strict_q[rows],
        status_counts=groups.status_counts,
        num_truncated=groups.num_truncated,
        lengths=groups.lengths,
        num_of_known_end=groups.num_of_known_end,
    )


def select(groups: Groups, solved_q: np.ndarray, config: FilterConfig, seed: int) -> Selection:
    """Give every question its role; `solved_q` tells which have a reference solution."""
    import numpy as np

    rate_q = groups.pass_rate_q(config.score)
    keep_q = (rate_q > config.keep_above) & (rate_q < config.keep_below)
    right = np.flatnonzero(rate_q == 1.0)
    chosen = np.random.default_rng(seed).permutation(right)[: round(config.easy_share * len(right))]
    easy_q = np.zeros(len(rate_q), dtype=bool)
    easy_q[chosen] = True
    live = np.flatnonzero(keep_q)
    held_back = np.random.default_rng([seed, 1]).permutation(live)
    held_back = held_back[: round(config.warmup_share * len(live))]
    keep_q[held_back] = False
    # Their right samples can be learnt from where they have no reference solution.
    solved_q = solved_q.copy()
    solved_q[held_back] = True
    role_q = np.where(
        keep_q | easy_q,
        ROLES.index(Role.RL),
        np.where(solved_q, ROLES.index(Role.WARMUP), ROLES.index(Role.DROPPED)),
    )
    return Selection(role_q, easy_q)


def _why(num_right: int, num_samples: int, role: Role, easy: bool, config: FilterConfig) -> str:
    counted = f"{num_right} of {num_samples} {config.score}ly right"
    if easy:
        return f"{counted}: {EASY}"
    if role is Role.RL:
        return f"{counted}: some right, some wrong"
    rate = num_right / num_samples
    if config.keep_above < rate < config.keep_below:
        return f"{counted}: held back for the warm-start"
    if rate in (0.0, 1.0):
        reason = "no reward variance, no gradient"
    elif rate <= config.keep_above:
        reason = f"at or below filter.keep_above={config.keep_above:g}"
    else:
        reason = f"at or above filter.keep_below={config.keep_below:g}"
    return f"{counted}: {reason}" + ("; no reference solution" if role is Role.DROPPED else "")


def selection_table(groups: Groups, selection: Selection, config: FilterConfig) -> pa.Table:
    """The 'selection' table: one row per question, in the order of `groups`."""
    import numpy as np
    import pyarrow as pa

    right_q = groups.num_right_q(config.score)
    # One reason per distinct case: a million questions share a few dozen texts.
    shape = (int(groups.num_samples_q.max()) + 1,) * 2 + (len(ROLES), 2)
    case_q = np.ravel_multi_index(
        (right_q, groups.num_samples_q, selection.role_q, selection.easy_q.astype(int)), shape
    )
    cases, text_q = np.unique(case_q, return_inverse=True)
    texts = [
        _why(int(right), int(samples), ROLES[role], bool(easy), config)
        for right, samples, role, easy in zip(*np.unravel_index(cases, shape), strict=True)
    ]

    def named(values: list[str], codes: np.ndarray) -> pa.Array:
        return pa.array(values, pa.string()).take(pa.array(codes))

    buckets = [bucket.value for bucket in BUCKETS]
    return pa.table(
        {
            "question_id": groups.question_ids,
            "num_samples": groups.num_samples_q,
            "pass_rate_lenient": groups.pass_rate_q("lenient"),
            "pass_rate_strict": groups.pass_rate_q("strict"),
            "bucket": named(buckets, bucket_codes(groups.num_samples_q, right_q)),
            "role": named([role.value for role in ROLES], selection.role_q),
            "why": named(texts, text_q),
        }
    )


def _stop_if_nothing_is_left(
    selection: Selection, found: Headroom, advice: Recommendation, config: FilterConfig
) -> None:
    if selection.count(Role.RL):
        return
    buckets = found.buckets_lenient if config.score == "lenient" else found.buckets_strict
    live = buckets[Bucket.LIVE.value]
    bounds = f"{config.keep_above:g} < {config.score} pass rate < {config.keep_below:g}"
    hint = (
        f"widen filter.keep_above / filter.keep_below ({live:,} questions are live)"
        if live
        else f"{advice.action.value} ({'; '.join(advice.reasons)})"
    )
    raise UserError(
        f"no question is left for RL with {bounds}: of {found.num_questions:,} questions "
        f"{buckets['always_wrong']:,} are always wrong, {live:,} live and "
        f"{buckets['always_right']:,} always right in {num_samples_words(found)} samples; "
        f"headroom: pass@1 {found.pass_at_1_lenient:.3f} lenient and "
        f"{found.pass_at_1_strict:.3f} strict, {pass_at_k_words(found)} "
        f"{found.pass_at_k_lenient:.3f}, no readable answer in "
        f"{found.parse_failure_rate:.1%} of the completions. What to do: {hint}"
    )


def _markdown(summary: dict[str, Any], found: Headroom) -> str:
    roles = summary["roles_by_bucket"]
    num_questions = sum(summary["roles"].values())
    lines = [
        f"**{summary['roles']['rl']:,} of {num_questions:,} questions are left for RL**, "
        f"{summary['roles']['warmup']:,} for the warm-up. Of groups of {found.group_size}, "
        f"{summary['rl_live_share']:.0%} are expected to be live.",
        "",
        "| bucket | questions | rl | warmup | dropped |",
        "|---|---:|---:|---:|---:|",
    ]
    for bucket, counts in roles.items():
        cells = " | ".join(f"{counts[role.value]:,}" for role in ROLES)
        lines.append(f"| {bucket.replace('_', ' ')} | {sum(counts.values()):,} | {cells} |")
    cut = found.truncated_share
    lines += [
        "",
        f"pass@1 {found.pass_at_1_lenient:.3f} lenient, {found.pass_at_1_strict:.3f} strict; "
        f"{pass_at_k_words(found)} {found.pass_at_k_lenient:.3f} lenient. No readable answer: "
        f"{found.parse_failure_rate:.1%}; cut off: {'not known' if cut is None else f'{cut:.1%}'}.",
        "",
        f"Recommendation: **{summary['recommendation']['action']}**: "
        + "; ".join(summary["recommendation"]["reasons"])
        + ".",
    ]
    return "\n".join(lines)


def _roles_by_bucket(table: pa.Table) -> dict[str, dict[str, int]]:
    counted = table.group_by(["bucket", "role"]).aggregate([([], "count_all")]).to_pylist()
    found = {(row["bucket"], row["role"]): row["count_all"] for row in counted}
    buckets = [bucket.value for bucket in BUCKETS]
    if any(bucket == UNSEEN for bucket, _ in found):
        buckets.append(UNSEEN)
    return {
        bucket: {role.value: found.get((bucket, role.value), 0) for role in ROLES}
        for bucket in buckets
    }


def unseen_table(ids: pa.Array, num_samples_q: np.ndarray, solved_q: np.ndarray) -> pa.Table:
    """Rows of the 'selection' table for questions that an earlier run logged less than twice. They
    never go to RL: whether they are live isn't known."""
    import pyarrow as pa

    words = ("not drawn by the run whose rollouts are used", "1 completion was logged: too few")
    return pa.table(
        {
            "question_id": ids,
            "num_samples": num_samples_q,
            "pass_rate_lenient": pa.nulls(len(ids), pa.float64()),
            "pass_rate_strict": pa.nulls(len(ids), pa.float64()),
            "bucket": [UNSEEN] * len(ids),
            "role": [Role.WARMUP.value if solved else Role.DROPPED.value for solved in solved_q],
            "why": [
                words[number] + ("" if solved else "; no reference solution")
                for number, solved in zip(num_samples_q, solved_q, strict=True)
            ],
        }
    )


def run(ctx: StageContext, *, filter: FilterConfig, grpo: GrpoConfig) -> StageResult:
    """Write the selection table.

    UserError for fewer than two samples of a question, NaN rewards, scores of other questions, or
    an empty RL set.
    """
    import numpy as np
    import pyarrow as pa

    scores = ctx.inputs["scores"]
    partial = scores.manifest.stage == "rollouts"
    ids, solved_q = training_questions(ctx.inputs["questions"].path("questions.parquet"))
    counted = read_groups(scores.path("scores.parquet"))
    row_q = align(counted, ids, partial=partial)
    num_samples_q = np.where(row_q < 0, 0, counted.num_samples_q[row_q])
    if (fewest := int(num_samples_q.min())) < 2 and not partial:
        raise UserError(
            f"a question has {fewest} sample: telling live questions from the others takes at "
            "least 2; raise presample.k and sample again"
        )
    known_q = num_samples_q >= 2
    # Each question has one row, hence one role: RL and warm-up share none.
    assert (np.bincount(row_q[known_q]) <= 1).all(), "a question was selected twice"
    groups = reorder(counted, row_q[known_q])
    selection = select(groups, solved_q[known_q], filter, ctx.seed)
    found = headroom(groups, grpo.group_size, float(solved_q.mean()))
    advice = recommend(found)
    _stop_if_nothing_is_left(selection, found, advice, filter)

    rl_q = selection.role_q == ROLES.index(Role.RL)
    rl_live_share = live_share_of(groups, rl_q, filter.score, grpo.group_size)
    table = selection_table(groups, selection, filter)
    if partial:
        unseen = unseen_table(
            ids.filter(pa.array(~known_q)), num_samples_q[~known_q], solved_q[~known_q]
        )
        table = pa.concat_tables([table, unseen.cast(table.schema)])
    ctx.write_table("selection", table)
    ctx.log(
        f"{selection.count(Role.RL):,} questions for RL, {rl_live_share:.0%} of their groups "
        f"expected live; recommendation: {advice.action.value} ({'; '.join(advice.reasons)})"
    )
    by_bucket = _roles_by_bucket(table)
    summary = {
        "num_rl_questions": selection.count(Role.RL),
        "roles": {
            role.value: sum(counts[role.value] for counts in by_bucket.values()) for role in ROLES
        },
        "roles_by_bucket": by_bucket,
        "num_easy_kept": int(selection.easy_q.sum()),
        "rl_live_share": rl_live_share,
        "headroom": found.as_dict(),
        "recommendation": advice.as_dict(),
    }
    return StageResult(summary=summary, markdown=_markdown(summary, found))
