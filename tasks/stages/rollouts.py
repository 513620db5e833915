"""Turn what an earlier RL run logged into scores, in place of presampling and scoring.

    logged completions → whose question? → right? → scores.parquet

A question is found by its id, its text, or the prompt that holds it; completions of other
questions, and of prompts that may hold ours as an example only, are counted and left out. Recorded
verdicts are used as they are; texts without one are verified against the question's gold; or a
logged reward decides, where `rollouts.reward` names it.

Rollouts differ from presamples in what they say: they come from as many policies as there were
steps, so a pass rate is an average over training, and a question that RL never drew has none.
Which steps count is `rollouts.first_steps` / `last_steps`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.run import PromptConfig, RolloutsConfig
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF
from ratchet.questions.match import QuestionFinder
from ratchet.rollouts.rows import Logged, Source, open_source
from ratchet.store.schemas import schema
from ratchet.verifier import Status, Style, close_shared_pool, verify_batch
from tasks.runtime.context import StageContext, StageResult

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 4096
Row = dict[str, Any]


@dataclass(frozen=True)
class RolloutScorer:
    """Verdicts for logged completions."""

    finder: QuestionFinder
    by_id: bool
    """Whether the ids that were logged are of this run's kind, so that they decide."""
    ids: list[str]
    golds: list[str]
    style: Style
    prefilled: str
    """What this run's chat template writes at the start of every answer."""

    def question_of(self, logged: Logged) -> int | None:
        """Row of the question that was answered; None when it is no training question here."""
        if self.by_id and logged.question_id is not None:
            return self.finder.row_of_id.get(logged.question_id)
        for text in (logged.question, logged.prompt):
            if text is not None and (row := self.finder.in_prompt(text)) is not None:
                return row
        return None

    def score(self, found: list[tuple[int, Logged]]) -> list[Row]:
        """Rows of the scores table, without their sample index."""
        open_ones = [one for one in found if one[1].verdict is None and one[1].right is None]
        texts = [
            (self.prefilled if logged.opening is None else logged.opening)
            + (logged.completion or "")
            for _, logged in open_ones
        ]
        verdicts = iter(verify_batch(texts, [self.golds[q] for q, _ in open_ones], self.style))
        rows = []
        for question, logged in found:
            extracted = None
            if logged.verdict is not None:
                status, strict, lenient = logged.verdict
            elif logged.right is not None:
                status, strict, lenient = Status.OK.value, logged.right, logged.right
            else:
                verdict = next(verdicts)
                status, strict, lenient = verdict.status.value, verdict.strict, verdict.lenient
                extracted = verdict.extracted
            rows.append(
                {
                    "question_id": self.ids[question],
                    "status": status,
                    "extracted": extracted,
                    "strict": strict,
                    "lenient": lenient,
                    "truncated": logged.truncated,
                    "num_tokens": logged.num_tokens,
                }
            )
        return rows


def make_scorer(ctx: StageContext, prompt: PromptConfig, source: Source) -> RolloutScorer:
    """The scorer of `source` over this run's training questions."""
    import pyarrow.compute as pc

    artifact = ctx.inputs["questions"]
    table = artifact.table("questions", ["question_id", "question", "gold", "role"])
    table = table.filter(pc.equal(table.column("role"), "train"))
    ids, texts = (table.column(name).to_pylist() for name in ("question_id", "question"))
    logged_ids, prompts = source.whose()
    return RolloutScorer(
        QuestionFinder(ids, texts, prompts),
        not logged_ids.isdisjoint(ids),
        ids,
        table.column("gold").to_pylist(),
        STYLE_OF[prompt.format],
        artifact.manifest.summary["prefilled"],
    )


def judged_by(source: Source, style: Style, num_recorded: int, num_samples: int) -> str:
    """In words, what decided between right and wrong."""
    config = source.config
    if config.reward is not None:
        return f"the logged '{config.reward}', right from {config.threshold:g} on"
    if num_recorded == num_samples:
        return "the verdicts that were recorded"
    ours = f"our verifier, reading the texts in style '{style}' against the questions' golds"
    return f"{ours}, or the verdict recorded" if num_recorded else ours


def _steps(source: Source) -> dict[str, int] | None:
    if not source.steps:
        return None
    used = sorted(source.used)
    return {
        "logged": len(source.steps),
        "used": len(used),
        "first": used[0],
        "last": used[-1],
    }


def _policies(steps: dict[str, int] | None) -> str:
    """What kind of samples these are, in words."""
    if steps is None:
        return "No steps were logged: how many policies answered isn't known"
    if steps["used"] == 1:
        return f"All are of step {steps['first']}, hence of one policy"
    part = "" if steps["used"] == steps["logged"] else f" of {steps['logged']:,}"
    return (
        f"They come from {steps['used']:,}{part} logged steps ({steps['first']} to "
        f"{steps['last']}) and up to as many policies: pass rates are averages over that "
        "training, not those of one model (rollouts.first_steps / last_steps narrow it down)"
    )


def _check(summary: Row, num_logged: int, path: str, style: Style) -> None:
    """UserError when what was read can tell no question from another."""
    if not num_logged:
        raise UserError(f"rollouts.path: {path} holds no completions")
    if summary["num_unclear"] and not summary["num_samples"]:
        raise UserError(
            f"the prompts in {path} hold training questions of this run, but what follows those "
            "ends no other prompt, so they may be worked examples: log a column 'question_id' or "
            "'question'"
        )
    if not summary["num_samples"]:
        raise UserError(
            f"none of the {num_logged:,} completions in {path} answers a training question of this "
            "run: take the rollouts of a run on the same questions, or add those to questions.train"
        )
    if summary["status_rates"]["parse_failure"] == 1.0:
        raise UserError(
            f"no answer can be read in any of the {summary['num_samples']:,} completions in style "
            f"'{style}': set prompt.format to what they were asked for, or rollouts.reward to a "
            "logged column that tells right from wrong"
        )
    if summary["most_samples"] < 2:
        raise UserError(
            f"{path} holds one completion per question: telling live questions from the others "
            "takes at least 2 (TRL's log_unique_prompts logs one of each group; turn it off, or "
            "take its Parquet files)"
        )


def run(ctx: StageContext, *, prompt: PromptConfig, rollouts: RolloutsConfig) -> StageResult:
    """Write the scores table, a row per logged completion of a training question.

    UserError when nothing usable was logged: see `open_source` and `_check`.
    """
    import pyarrow.parquet as pq

    given = ctx.inputs.get("rollouts")
    assert rollouts.path is not None
    place = Path(rollouts.path) if given is None else given.path("rollouts.parquet")
    shown = rollouts.path if given is None else given.ref
    source = open_source(place, rollouts)
    scorer = make_scorer(ctx, prompt, source)
    seen: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    num_logged = num_recorded = num_unclear = 0
    table_schema = schema("scores")
    with pq.ParquetWriter(ctx.out_dir / "scores.parquet", table_schema, compression="zstd") as out:
        completions = source.completions()
        while part := list(islice(completions, BATCH_ROWS)):
            placed = [(scorer.question_of(one), one) for one in part]
            found = [(row, one) for row, one in placed if row is not None]
            num_unclear += sum(
                row is None and one.prompt in scorer.finder.unclear for row, one in placed
            )
            num_logged += len(part)
            num_recorded += sum(one.verdict is not None for _, one in found)
            rows = scorer.score(found)
            for scored in rows:
                scored["sample_index"] = seen[scored["question_id"]]
                seen[scored["question_id"]] += 1
                statuses[scored["status"]] += 1
                sums.update(strict=scored["strict"], lenient=scored["lenient"])
            out.write_table(_table(rows, table_schema))
            ctx.progress(num_logged, num_logged, "completions", "read and judged")
    close_shared_pool()
    total = sum(seen.values())
    steps = _steps(source)
    summary = {
        "num_samples": total,
        "num_questions": len(seen),
        "num_train_questions": len(scorer.ids),
        "most_samples": max(seen.values(), default=0),
        "num_other_questions": num_logged - total - num_unclear,
        "num_unclear": num_unclear,
        "num_repeated": source.num_repeated,
        "num_tables": len(source.tables),
        "num_other_tables": source.num_other_tables,
        "strict": sums["strict"] / max(total, 1),
        "lenient": sums["lenient"] / max(total, 1),
        "status_rates": {s.value: statuses[s.value] / max(total, 1) for s in Status},
        "judged_by": judged_by(source, scorer.style, num_recorded, total),
        "steps": steps,
        "policies": _policies(steps),
        "path": shown,
    }
    _check(summary, num_logged, shown, scorer.style)
    lines = _sentences(summary)
    for line in lines:
        ctx.log(line)
    return StageResult(summary=summary, markdown=_markdown(summary, lines))


def _table(rows: list[Row], table_schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=table_schema)


def _sentences(summary: Row) -> list[str]:
    lines = [
        f"{summary['num_samples']:,} completions of {summary['num_questions']:,} of the "
        f"{summary['num_train_questions']:,} training questions",
        f"right and wrong are judged by {summary['judged_by']}",
        summary["policies"],
    ]
    if summary["num_other_questions"]:
        lines.append(
            f"{summary['num_other_questions']:,} completions answer no training question of this "
            "run and are left out"
        )
    if summary["num_unclear"]:
        lines.append(
            f"{summary['num_unclear']:,} completions are left out, as the training question in "
            "their prompt may be a worked example: what follows it ends no other prompt"
        )
    if summary["num_repeated"]:
        lines.append(f"{summary['num_repeated']:,} completions were logged again: counted once")
    return lines


def _markdown(summary: Row, lines: list[str]) -> str:
    return "\n".join(
        [
            f"**{summary['strict']:.3f} strictly right, {summary['lenient']:.3f} leniently**, "
            f"from `{summary['path']}`.",
            "",
            *(f"- {line[0].upper()}{line[1:]}." for line in lines),
        ]
    )
