"""Rejection sampling: the model's own verified-right samples as something to learn from.

Presampling has drawn k completions of every training question and scoring has judged them. Of the
warm-up's questions, those that are strictly right are taken as they were sampled, token by token: a
right answer in another format than demanded would teach that format, and rewritten it would no
longer be the model's. Questions that were always wrong have none; always-right ones have k, and so
have those that `filter.warmup_share` holds back from RL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ratchet.config.run import PromptFormat, SftConfig
from ratchet.errors import UserError
from ratchet.prompts import prompt_ids
from ratchet.rewards.weights import total_reward
from ratchet.store.schemas import REWARD, check_schema
from tasks.runtime.context import StageContext
from tasks.training.seeds import training_order
from tasks.warmstart.data import Example, end_of_turn_id

Pick = Literal["best", "shortest", "all"]
Row = dict[str, Any]


@dataclass(frozen=True)
class SampleSet:
    """Examples made of samples, and what was found on the way."""

    examples: list[Example]
    num_questions: int
    """Questions with a strictly right sample."""
    num_right: int
    """Strictly right samples of the warm-up's questions."""
    num_right_elsewhere: int
    """Right ones that aren't in the demanded format, and are left out."""
    num_too_long: int
    """Chosen ones that with their prompts are too long, and are left out."""

    def summary(self) -> dict[str, int]:
        """Figures for the stage's summary."""
        return {
            "num_sample_examples": len(self.examples),
            "num_sample_questions": self.num_questions,
            "num_samples_right": self.num_right,
            "num_samples_right_elsewhere": self.num_right_elsewhere,
            "num_samples_too_long": self.num_too_long,
        }


def _rows_of(ctx: StageContext, role: str, table: str, question_ids: set[str]) -> list[Row]:
    """Rows of a table of samples that belong to these questions; read in batches, because a table
    may hold every training question's."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    wanted = pa.array(sorted(question_ids), pa.string())
    path = ctx.inputs[role].path(f"{table}.parquet")
    columns = ["question_id", "sample_index", "token_ids"] if table == "completions" else None
    rows: list[Row] = []
    with pq.ParquetFile(path) as file:
        check_schema(file.schema_arrow, table, str(path))
        for batch in file.iter_batches(columns=columns, use_threads=False):
            mine = pc.is_in(batch.column("question_id"), value_set=wanted)
            rows += batch.filter(mine).to_pylist()
    return rows


def pick(rows: Sequence[Row], how: Pick, weights: Mapping[str, float]) -> list[Row]:
    """Of one question's strictly right samples (rows of the scores table) the ones to learn from.

    'best' is the one with the highest weighted reward, of equal ones the shortest; ties go to the
    first drawn.
    """
    in_order = sorted(rows, key=lambda row: (row["num_tokens"], row["sample_index"]))
    if how == "all":
        return sorted(rows, key=lambda row: int(row["sample_index"]))
    if how == "shortest":
        return in_order[:1]

    def reward(row: Row) -> float:
        return total_reward({name: row[REWARD + name] for name in weights}, dict(weights))

    return [max(in_order, key=reward)]


def right_samples(
    ctx: StageContext,
    questions: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    sft: SftConfig,
    *,
    enable_thinking: bool,
) -> SampleSet:
    """Examples of the samples that `sft.samples` picks, question by question in the order given.

    At most `sft.max_examples` questions are used; equal samples of a question count once. UserError
    when none is strictly right or short enough.
    """
    assert sft.samples != "none"
    ids = {row["question_id"] for row in questions}
    scores = _rows_of(ctx, "scores", "scores", ids)
    right: dict[str, list[Row]] = {}
    for row in scores:
        if row["strict"] and not row["truncated"]:
            right.setdefault(row["question_id"], []).append(row)
    tokens = {
        (row["question_id"], row["sample_index"]): row["token_ids"]
        for row in _rows_of(ctx, "completions", "completions", set(right))
    }
    weights = ctx.inputs["scores"].manifest.summary["reward_weights"]
    end = end_of_turn_id(tokenizer)
    examples: list[Example] = []
    num_too_long = 0
    used = [row for row in questions if row["question_id"] in right][: sft.max_examples]
    for question in used:
        name = question["question_id"]
        prompt = prompt_ids(
            tokenizer, prompt_format, question["question"], enable_thinking=enable_thinking
        )
        chosen = pick(right[name], sft.samples, weights)
        # The last token ended the sample; what the references end in takes its place.
        answers = dict.fromkeys((*tokens[name, row["sample_index"]][:-1], end) for row in chosen)
        short = [answer for answer in answers if len(prompt) + len(answer) <= sft.max_length]
        num_too_long += len(answers) - len(short)
        examples += [Example(name, prompt, list(answer)) for answer in short]
    if not examples:
        raise UserError(_why_none(len(ids), num_too_long, sft))
    return SampleSet(
        examples,
        len(right),
        sum(map(len, right.values())),
        sum(row["lenient"] and not row["strict"] for row in scores),
        num_too_long,
    )


def _why_none(num_questions: int, num_too_long: int, sft: SftConfig) -> str:
    if num_too_long:
        return (
            f"no sample is left for sft.samples = '{sft.samples}': all {num_too_long} are longer "
            f"than sft.max_length = {sft.max_length}"
        )
    return (
        f"sft.samples = '{sft.samples}', but none of the samples of the {num_questions} warm-up "
        "questions is strictly right: hold back live questions with filter.warmup_share, or set "
        "sft.samples = 'none'"
    )


def mixed_order(num_reference: int, num_samples: int, sft: SftConfig, seed: int) -> list[int]:
    """Training order over the reference examples and after them, from index `num_reference` on,
    the samples.

    Each kind is `epochs × weight` shuffled passes; the two are spread evenly over one another, so
    that every batch has about the same mix.
    """
    counts = (
        (num_reference, ceil(num_reference * sft.epochs * sft.reference_weight), 0),
        (num_samples, ceil(num_samples * sft.epochs * sft.samples_weight), num_reference),
    )
    placed = []
    for kind, (num_examples, num_rows, first) in enumerate(counts):
        if num_examples:
            order = training_order(num_examples, num_rows, seed + kind)
            placed += [((at + 0.5) / num_rows, kind, first + i) for at, i in enumerate(order)]
    return [index for _, _, index in sorted(placed, key=lambda one: one[:2])]
