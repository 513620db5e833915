"""Load the questions of a run and keep those it can use.

    load each source → gold readable? → prompt short enough? → no text twice

Writes `questions.parquet` (one row per question and role, with its prompt length in tokens) and
`dropped.jsonl` (every row left out, and why). A role that had sources and ends up empty stops
the run: training on nothing, or testing on nothing, is never what was meant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.config.run import (
    ModelConfig,
    PromptConfig,
    PromptFormat,
    QuestionsConfig,
    SamplerConfig,
)
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF, answer_start, prompt_ids, prompt_text
from ratchet.prompts.thinking import check_thinking
from ratchet.questions.load import Role, load
from ratchet.questions.screen import (
    Dropped,
    Item,
    Reason,
    counts,
    drop_duplicates,
)
from ratchet.verifier import Style, verify_batch
from tasks.models.checkpoints import load_tokenizer, model_context
from tasks.runtime.context import StageContext, StageResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES: tuple[Role, ...] = ("train", "warmup", "dev", "test")
PROGRESS_EVERY = 500
"""Questions between two progress events."""

ANSWER_IN: dict[Style, str] = {
    Style.TAGS: "<start_working_out>\n-\n<end_working_out>\n<SOLUTION>{}</SOLUTION>",
    Style.HASH: "#### {}",
    Style.BOXED: "\\boxed{{{}}}",
    Style.PLAIN: "{}",
}
"""A right answer in each style, to try a gold against itself."""


@dataclass(frozen=True)
class Measured:
    """A question that passed the door."""

    item: Item
    num_prompt_tokens: int


def run(
    ctx: StageContext,
    *,
    questions: QuestionsConfig,
    prompt: PromptConfig,
    model: ModelConfig,
    sampler: SamplerConfig,
) -> StageResult:
    """Load, check, measure and screen the questions of all roles.

    UserError for unusable sources, for limits that exceed the model's context, and for a role
    that ends up empty.
    """
    start = ctx.inputs["model"]
    context = model_context(start)
    assert context is not None, "the model stage always states a context"
    check_context(questions, sampler, context)
    tokenizer = load_tokenizer(start)
    if model.enable_thinking:
        check_thinking(tokenizer, prompt.format, "model.enable_thinking")

    items, dropped = load_all(ctx, questions)
    num_loaded = {role: sum(item.role == role for item in items) for role in ROLES}
    items, unreadable = drop_unreadable(ctx, items, STYLE_OF[prompt.format])
    measured, too_long, longest = drop_long(
        ctx, items, tokenizer, prompt.format, model.enable_thinking, questions.max_prompt_tokens
    )
    kept, duplicates = drop_duplicates([entry.item for entry in measured])
    dropped += unreadable + too_long + duplicates
    for role in ROLES:
        if getattr(questions, role) and not any(item.role == role for item in kept):
            raise UserError(why_empty(role, dropped, longest, questions.max_prompt_tokens))

    usable = {id(item) for item in kept}  # by identity: a duplicate may be equal to the kept one
    measured = [entry for entry in measured if id(entry.item) in usable]
    ctx.write_table("questions", [_row(entry) for entry in measured])
    lines = "".join(json.dumps(_dropped_row(entry), ensure_ascii=False) + "\n" for entry in dropped)
    (ctx.out_dir / "dropped.jsonl").write_text(lines, encoding="utf-8")

    example = prompt_text(
        tokenizer,
        prompt.format,
        measured[0].item.question.question,
        enable_thinking=model.enable_thinking,
    )
    summary = _summary(measured, dropped, num_loaded, answer_start(example))
    return StageResult(summary=summary, markdown=_markdown(measured, dropped, prompt, example))


def check_context(questions: QuestionsConfig, sampler: SamplerConfig, context: int) -> None:
    """UserError unless the longest prompt and the longest completion fit `context` tokens."""
    need = questions.max_prompt_tokens + sampler.max_completion_tokens
    if need > context:
        raise UserError(
            f"questions.max_prompt_tokens {questions.max_prompt_tokens} + "
            f"sampler.max_completion_tokens {sampler.max_completion_tokens} = {need} tokens exceed "
            f"the model's context of {context}: lower one of them"
        )


def load_all(ctx: StageContext, questions: QuestionsConfig) -> tuple[list[Item], list[Dropped]]:
    """The questions of every source by role, and the repeats within a source."""
    items: list[Item] = []
    dropped: list[Dropped] = []
    for role in ROLES:
        for index, source in enumerate(getattr(questions, role)):
            loaded = load(source, role, index)
            ctx.log(f"{role}: {len(loaded.questions)} questions from {source.label}")
            items += [Item(question, role) for question in loaded.questions]
            dropped += [
                Dropped(Item(question, role), Reason.REPEAT, "again in its source")
                for question in loaded.repeats
            ]
    return items, dropped


def drop_unreadable(
    ctx: StageContext, items: Sequence[Item], style: Style
) -> tuple[list[Item], list[Dropped]]:
    """Drop questions whose gold, given as the answer, is not accepted: nothing else could be."""
    kept, dropped = [], []
    for start in range(0, len(items), PROGRESS_EVERY):
        batch = items[start : start + PROGRESS_EVERY]
        golds = [item.question.gold for item in batch]
        answers = [ANSWER_IN[style].format(gold) for gold in golds]
        for item, verdict in zip(batch, verify_batch(answers, golds, style), strict=True):
            if verdict.lenient:
                kept.append(item)
                continue
            gold = item.question.gold
            detail = f"gold {gold!r} in style {style}: {verdict.status}, {verdict.reason}"
            dropped.append(Dropped(item, Reason.GOLD_UNPARSEABLE, detail))
        ctx.progress(start + len(batch), len(items), "golds", "checked by the verifier")
    return kept, dropped


def drop_long(
    ctx: StageContext,
    items: Sequence[Item],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    enable_thinking: bool,
    max_tokens: int,
) -> tuple[list[Measured], list[Dropped], dict[Role, int]]:
    """Questions whose prompt has at most `max_tokens` tokens, the others, and the longest prompt
    of each role in tokens."""
    kept: list[Measured] = []
    dropped: list[Dropped] = []
    longest: dict[Role, int] = {}
    for done, item in enumerate(items, start=1):
        text = item.question.question
        count = len(prompt_ids(tokenizer, prompt_format, text, enable_thinking=enable_thinking))
        longest[item.role] = max(count, longest.get(item.role, 0))
        if count <= max_tokens:
            kept.append(Measured(item, count))
        else:
            detail = f"{count} tokens, the limit is {max_tokens}"
            dropped.append(Dropped(item, Reason.PROMPT_TOO_LONG, detail))
        if done % PROGRESS_EVERY == 0 or done == len(items):
            ctx.progress(done, len(items), "prompts", "rendered and measured")
    return kept, dropped, longest


def why_empty(
    role: Role, dropped: Sequence[Dropped], longest: dict[Role, int], max_tokens: int
) -> str:
    """What to tell a user whose role has no question left, by the commonest reason."""
    found = counts([entry for entry in dropped if entry.reason is not Reason.REPEAT], role)
    listing = ", ".join(f"{reason} {number}" for reason, number in found.items())
    advice = {
        Reason.GOLD_UNPARSEABLE: "check the gold column, or set a prompt.format for such answers",
        Reason.PROMPT_TOO_LONG: f"the longest prompt has {longest.get(role)} tokens, "
        f"questions.max_prompt_tokens is {max_tokens}: raise it or shorten the prompt format",
        Reason.DUPLICATE: "its questions are in other roles too: give the roles different slices "
        "(split, offset, limit)",
    }
    return (
        f"no question is left in questions.{role} ({listing}): {advice[Reason(next(iter(found)))]}"
    )


def _row(entry: Measured) -> dict[str, Any]:
    question = entry.item.question
    return {
        "question_id": question.question_id,
        "source": question.source,
        "split": question.split,
        "role": entry.item.role,
        "question": question.question,
        "gold": question.gold,
        "reference_solution": question.reference_solution,
        "difficulty": question.difficulty,
        "band": question.band,
        "num_prompt_tokens": entry.num_prompt_tokens,
    }


def _dropped_row(entry: Dropped) -> dict[str, Any]:
    question = entry.item.question
    return {
        "role": entry.item.role,
        "reason": entry.reason.value,
        "detail": entry.detail,
        "question_id": question.question_id,
        "source": question.source,
        "split": question.split,
        "question": question.question,
        "gold": question.gold,
    }


def _summary(
    measured: Sequence[Measured],
    dropped: Sequence[Dropped],
    num_loaded: dict[Role, int],
    prefilled: str,
) -> dict[str, Any]:
    return {
        "questions": {role: sum(entry.item.role == role for entry in measured) for role in ROLES},
        "loaded": dict(num_loaded),
        "dropped": {role: counts(dropped, role) for role in ROLES},
        "longest_prompt_tokens": max(entry.num_prompt_tokens for entry in measured),
        "prefilled": prefilled,
    }


def _markdown(
    measured: Sequence[Measured], dropped: Sequence[Dropped], prompt: PromptConfig, example: str
) -> str:
    """A table by role and source, and one prompt as the model gets it."""
    lines = [
        "| role | source | questions | dropped | longest prompt (tokens) |",
        "|---|---|---:|---|---:|",
    ]
    everywhere = [entry.item for entry in measured] + [entry.item for entry in dropped]
    groups = dict.fromkeys((item.role, item.question.source) for item in everywhere)
    for role, source in sorted(groups, key=lambda group: ROLES.index(group[0])):
        tokens = [
            entry.num_prompt_tokens
            for entry in measured
            if (entry.item.role, entry.item.question.source) == (role, source)
        ]
        of_source = [entry for entry in dropped if entry.item.question.source == source]
        reasons = counts(of_source, role).items()
        listing = ", ".join(f"{reason} {number}" for reason, number in reasons) or "none"
        longest = max(tokens, default=0)
        lines.append(f"| {role} | {source} | {len(tokens)} | {listing} | {longest} |")
    if prefilled := answer_start(example):
        lines += ["", f"The chat template writes the opening `{prefilled}` itself."]
    fence = "`" * 4
    lines += ["", f"One prompt in format `{prompt.format}`:", "", fence, example, fence]
    return "\n".join(lines)
