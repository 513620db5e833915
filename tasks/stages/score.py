"""Verify and reward every sampled completion.

Sampling and scoring are separate artifacts, so another reward or a better verifier scores again
without generating. Completions are read, scored and written in batches: memory doesn't grow with
their number. Many are scored in several processes, with the same table. A reward that does not
apply to a completion is null in its column, never zero.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.run import PromptConfig, PromptFormat, RewardsConfig
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF
from ratchet.rewards.checked import CheckedReward
from ratchet.rewards.weights import default_weights, resolve_rewards
from ratchet.store.schemas import REWARD, check_schema, schema
from ratchet.store.store import Artifact
from ratchet.verifier import Status, Style, close_shared_pool, verify_batch
from tasks.runtime.context import StageContext, StageResult
from tasks.runtime.supervisor import die_with_parent

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 4096
PARALLEL_ROWS = 16_384
"""Completions from which several processes score: they take a second or two to start."""
MOST_PROCESSES = 16
COMPLETION_COLUMNS = [
    "question_id",
    "sample_index",
    "prompt_format",
    "text",
    "num_tokens",
    "finish_reason",
    "model_key",
]
QUESTION_COLUMNS = ["question_id", "question", "gold", "reference_solution"]


@dataclass
class Tally:
    """Sums over everything scored so far."""

    num_samples: int = 0
    num_truncated: int = 0
    num_strict: int = 0
    num_lenient: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reward_sums: Counter[str] = field(default_factory=Counter)
    reward_counts: Counter[str] = field(default_factory=Counter)
    """Completions that a reward applied to."""

    def add(self, columns: dict[str, list[Any]], weights: dict[str, float]) -> None:
        """Add one scored batch."""
        self.num_samples += len(columns["status"])
        self.num_truncated += sum(columns["truncated"])
        self.num_strict += sum(columns["strict"])
        self.num_lenient += sum(columns["lenient"])
        self.statuses.update(columns["status"])
        for name in weights:
            given = [value for value in columns[REWARD + name] if value is not None]
            self.reward_sums[name] += sum(given)
            self.reward_counts[name] += len(given)

    def summary(self, weights: dict[str, float]) -> dict[str, Any]:
        """Means and rates; the mean of a reward is over the completions it applies to."""
        n = self.num_samples
        return {
            "num_samples": n,
            "strict": self.num_strict / n,
            "lenient": self.num_lenient / n,
            "truncated_share": self.num_truncated / n,
            "status_rates": {status.value: self.statuses[status.value] / n for status in Status},
            "reward_means": {
                name: self.reward_sums[name] / self.reward_counts[name]
                if self.reward_counts[name]
                else None
                for name in weights
            },
            "reward_applies_share": {name: self.reward_counts[name] / n for name in weights},
            "reward_weights": weights,
            "total_reward_mean": sum(w * self.reward_sums[name] for name, w in weights.items()) / n,
        }


@dataclass(frozen=True)
class Scorer:
    """The verdict and every reward of a batch of completions."""

    style: Style
    rewards: list[CheckedReward]
    prefilled: str
    """What the chat template writes at the start of every answer."""

    def columns(self, completions: pa.Table, questions: pa.Table) -> dict[str, list[Any]]:
        """Columns of the scores table; `questions` holds the question of each completion."""
        texts = [self.prefilled + text for text in completions.column("text").to_pylist()]
        golds = questions.column("gold").to_pylist()
        verdicts = verify_batch(texts, golds, self.style)
        columns: dict[str, list[Any]] = {
            "question_id": completions.column("question_id").to_pylist(),
            "sample_index": completions.column("sample_index").to_pylist(),
            "status": [verdict.status.value for verdict in verdicts],
            "extracted": [verdict.extracted for verdict in verdicts],
            "strict": [verdict.strict for verdict in verdicts],
            "lenient": [verdict.lenient for verdict in verdicts],
            "truncated": [
                reason == "length" for reason in completions.column("finish_reason").to_pylist()
            ],
            "num_tokens": completions.column("num_tokens").to_pylist(),
        }
        known = {
            "gold": golds,
            "question": questions.column("question").to_pylist(),
            "reference_solution": questions.column("reference_solution").to_pylist(),
            "style": [self.style.value] * len(texts),
        }
        for reward in self.rewards:
            columns[REWARD + reward.__name__] = reward(texts, **known)
        return columns


def make_scorer(style: Style, weights: Mapping[str, float], prefilled: str) -> Scorer:
    """The scorer of one style with the rewards that `weights` names."""
    found = [CheckedReward(name, function) for name, function, _ in resolve_rewards(weights)]
    return Scorer(style, found, prefilled)


def num_processes(num_rows: int, style: Style) -> int:
    """Processes that score side by side. Boxed answers are compared by the verifier's own pool."""
    if num_rows < PARALLEL_ROWS or style is Style.BOXED:
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def scored(
    batches: Iterable[tuple[pa.Table, pa.Table]],
    processes: int,
    style: Style,
    weights: Mapping[str, float],
    prefilled: str,
) -> Iterator[dict[str, list[Any]]]:
    """Columns of the scores table for each batch (completions, their questions), in order. Few
    batches are under way at once, however many there are."""
    if processes == 1:
        scorer = make_scorer(style, weights, prefilled)
        yield from (scorer.columns(*batch) for batch in batches)
        return
    start = (os.getpid(), style, dict(weights), prefilled)
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, start) as pool:
        waiting: deque[Future[dict[str, list[Any]]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_score, *batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_scorers: list[Scorer] = []
"""In a scoring process: its scorer."""


def _begin(parent: int, style: Style, weights: dict[str, float], prefilled: str) -> None:
    die_with_parent(parent)
    _scorers.append(make_scorer(style, weights, prefilled))


def _score(completions: pa.Table, questions: pa.Table) -> dict[str, list[Any]]:
    return _scorers[0].columns(completions, questions)


def reward_weights(config: RewardsConfig, prompt_format: PromptFormat) -> dict[str, float]:
    """The configured weights, or the defaults of the format's answer style."""
    return dict(config.weights or default_weights(STYLE_OF[prompt_format]))


def completion_batches(path: Path, prompt_format: PromptFormat) -> Iterator[pa.Table]:
    """Batches of a completions table.

    UserError when completions of another prompt format or of several models are among them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    models: set[str] = set()
    with pq.ParquetFile(path) as file:
        check_schema(file.schema_arrow, "completions", str(path))
        for batch in file.iter_batches(BATCH_ROWS, columns=COMPLETION_COLUMNS, use_threads=False):
            formats = set(pc.unique(batch.column("prompt_format")).to_pylist())
            if formats != {prompt_format.value}:
                raise UserError(
                    f"{path} holds completions for prompt format "
                    f"{', '.join(sorted(formats - {prompt_format.value}))}, not {prompt_format}: "
                    "sample again with the format that is scored"
                )
            models.update(pc.unique(batch.column("model_key")).to_pylist())
            if len(models) > 1:
                raise UserError(
                    f"{path} mixes completions of {len(models)} models: pass rates would mean "
                    "nothing; sample again with one model"
                )
            yield pa.Table.from_batches([batch])


def questions_of(completions: pa.Table, questions: pa.Table) -> pa.Table:
    """The question of each completion. UserError for completions without one."""
    import pyarrow.compute as pc

    rows = pc.index_in(
        completions.column("question_id").combine_chunks(),
        value_set=questions.column("question_id").combine_chunks(),
    )
    if rows.null_count:
        raise UserError(
            f"{rows.null_count:,} completions belong to no question of this run: completions and "
            "questions come from different runs"
        )
    return questions.take(rows)


def read_questions(artifact: Artifact) -> pa.Table:
    """The training questions."""
    import pyarrow.compute as pc

    table = artifact.table("questions", [*QUESTION_COLUMNS, "role"])
    return table.filter(pc.equal(table.column("role"), "train")).select(QUESTION_COLUMNS)


def _markdown(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['num_samples']:,} completions: **{summary['strict']:.3f} strictly right, "
        f"{summary['lenient']:.3f} leniently**, {summary['truncated_share']:.1%} cut off.",
        "",
        "| reward | mean | weight | applies to |",
        "|---|---:|---:|---:|",
    ]
    for name, mean in summary["reward_means"].items():
        shown = "none apply" if mean is None else f"{mean:.3f}"
        lines.append(
            f"| {name} | {shown} | {summary['reward_weights'][name]:g} | "
            f"{summary['reward_applies_share'][name]:.0%} |"
        )
    lines.append(f"| **weighted total** | **{summary['total_reward_mean']:.3f}** | | |")
    rates = ", ".join(f"{name} {rate:.1%}" for name, rate in summary["status_rates"].items())
    return "\n".join([*lines, "", f"Verdicts: {rates}."])


def run(ctx: StageContext, *, prompt: PromptConfig, rewards: RewardsConfig) -> StageResult:
    """Write the scores table, a row per completion in the order of the completions.

    UserError for completions without a question, of another prompt format or of several models,
    and for a reward that gives no finite number.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    weights = reward_weights(rewards, prompt.format)
    style = STYLE_OF[prompt.format]
    prefilled = ctx.inputs["questions"].manifest.summary["prefilled"]
    questions = read_questions(ctx.inputs["questions"])
    path = ctx.inputs["completions"].path("completions.parquet")
    total = pq.read_metadata(path).num_rows
    if not total:
        raise UserError(f"{path} holds no completions: sample some first")
    tally = Tally()
    out_schema = schema("scores", [REWARD + name for name in weights])
    with pq.ParquetWriter(ctx.out_dir / "scores.parquet", out_schema, compression="zstd") as writer:
        batches = (
            (completions, questions_of(completions, questions))
            for completions in completion_batches(path, prompt.format)
        )
        processes = num_processes(total, style)
        for columns in scored(batches, processes, style, weights, prefilled):
            writer.write_table(pa.table(columns, schema=out_schema))
            tally.add(columns, weights)
            ctx.progress(tally.num_samples, total, "completions")
    close_shared_pool()
    summary = tally.summary(weights)
    return StageResult(summary=summary, markdown=_markdown(summary))
