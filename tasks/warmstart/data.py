"""What a warm-start learns from: which questions, and for SFT which tokens.

A warm-start never sees a question of the RL set. With `warmstart.data = 'dropped'` its questions
are those the filter left out (selection role `warmup`); with 'source' they are the questions of
role `warmup`, less those whose text is also a training question.

An SFT example is the prompt as the sampler renders it, then the reference solution in the run's
format, then the token that ends an assistant's turn. Only the last two carry loss. What the
verifier and the rewards would give the answer is checked on the decoded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ratchet.config.run import PromptFormat
from ratchet.errors import UserError
from ratchet.prompts import OPENING_THOUGHT, STYLE_OF, answer_start, prompt_ids, prompt_text
from ratchet.questions.decontaminate import normalise
from ratchet.questions.rewrite import rewrite_solution
from ratchet.rewards.weights import default_weights, resolve_rewards
from ratchet.verifier import Style, verify_batch
from tasks.models.checkpoints import turn_end
from tasks.runtime.context import StageContext

IGNORED = -100
"""Label of a token without loss."""
FULL_MARKS = {"tag_check": 0.5}
"""The most a reward gives, where that isn't 1."""


@dataclass(frozen=True)
class Example:
    """One question and the answer to learn."""

    question_id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    """Ends in the end-of-turn token."""

    @property
    def input_ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids

    @property
    def labels(self) -> list[int]:
        """The answer; prompt positions are ignored."""
        return [IGNORED] * len(self.prompt_ids) + self.answer_ids


@dataclass(frozen=True)
class ExampleSet:
    """Examples and what was left out on the way."""

    examples: list[Example]
    num_without_solution: int
    num_too_long: int


def warmup_questions(ctx: StageContext, data: Literal["dropped", "source"]) -> list[dict[str, Any]]:
    """Rows of the questions table that the warm-start may use, in table order.

    UserError when there is none, or when the selection gives a question to RL too.
    """
    rows = ctx.inputs["questions"].table("questions").to_pylist()
    if data == "source":
        found = _of_source(ctx, rows)
    else:
        selection = ctx.inputs["selection"].table("selection", ["question_id", "role"])
        found = _dropped(rows, selection.to_pylist())
    return found


def _of_source(ctx: StageContext, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    candidates = [row for row in rows if row["role"] == "warmup"]
    trained_on = {normalise(row["question"]) for row in rows if row["role"] == "train"}
    found = [row for row in candidates if normalise(row["question"]) not in trained_on]
    if len(found) < len(candidates):
        ctx.log(
            f"{len(candidates) - len(found)} of {len(candidates)} warm-up questions are also "
            "training questions and are left out"
        )
    if not found:
        raise UserError(
            f"no warm-up question is left: all {len(candidates)} of questions.warmup are also "
            "training questions. Give questions.warmup another source, or rows that "
            "questions.train does not take (offset, limit)"
        )
    return found


def _dropped(rows: list[dict[str, Any]], selection: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wanted = {row["question_id"] for row in selection if row["role"] == "warmup"}
    if not wanted:
        raise UserError(
            "the filter left no question for a warm-start: set warmstart.method = 'none', or "
            "warmstart.data = 'source' with questions.warmup"
        )
    rl_ids = {row["question_id"] for row in selection if row["role"] == "rl"}
    rl_texts = {
        normalise(row["question"]): row["question_id"]
        for row in rows
        if row["question_id"] in rl_ids
    }
    found = [row for row in rows if row["question_id"] in wanted]
    both = [row for row in found if normalise(row["question"]) in rl_texts]
    if both:
        question_id = both[0]["question_id"]
        raise UserError(
            f"{len(both)} warm-up questions are in the RL set too, such as {question_id} (there "
            f"as {rl_texts[normalise(both[0]['question'])]}): rerun the filter, or remove the "
            "duplicates from questions.train"
        )
    return found


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an assistant's turn: what the chat template writes after it, else the
    end-of-text token. UserError when there is neither."""
    ends = turn_end(tokenizer)
    if ends:
        return ends[0]
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the model's tokenizer has neither a chat template that ends a turn nor an "
            "end-of-text token: the model could not learn to stop"
        )
    return int(tokenizer.eos_token_id)


def check_full_marks(
    questions: Sequence[dict[str, Any]], answers: Sequence[str], style: Style
) -> None:
    """UserError unless every answer is strictly right and earns every format and correctness
    reward in full (`step_check` is about the way there and not asked)."""
    golds = [question["gold"] for question in questions]
    styles = [style] * len(answers)
    for question, verdict in zip(questions, verify_batch(answers, golds, styles), strict=True):
        if not verdict.strict:
            raise UserError(
                f"the reference solution of question {question['question_id']} is not strictly "
                f"right in style '{style}' ({verdict.status}: {verdict.reason}; gold "
                f"{question['gold']!r}): correct that row or leave it out"
            )
    for name, reward, _ in resolve_rewards(default_weights(style)):
        if name == "step_check":
            continue
        full = FULL_MARKS.get(name, 1.0)
        scores = reward(list(answers), gold=golds, style=styles)
        for question, score in zip(questions, scores, strict=True):
            if score not in (None, full):
                raise UserError(
                    f"the reference solution of question {question['question_id']} earns {score} "
                    f"of {full} from {name} in style '{style}': correct that row or leave it out"
                )


def build_examples(
    questions: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    *,
    enable_thinking: bool,
    max_length: int,
    limit: int | None,
) -> ExampleSet:
    """The SFT examples of `questions`, in their order, the first `limit` of them.

    Questions without a reference solution and examples of more than `max_length` tokens are left
    out and counted. UserError when none is left or a solution fails `check_full_marks`.
    """
    style = STYLE_OF[prompt_format]
    end = end_of_turn_id(tokenizer)
    used: list[dict[str, Any]] = []
    examples: list[Example] = []
    num_without = num_too_long = 0
    start = _answer_start(tokenizer, prompt_format, questions[0]["question"], enable_thinking)
    for question in questions:
        if len(examples) == limit:
            break
        if not question["reference_solution"]:
            num_without += 1
            continue
        text = rewrite_solution(question["reference_solution"], question["gold"], style)
        text = text.removeprefix(start).lstrip("\n") if start else text
        answer = tokenizer.encode(text, add_special_tokens=False)
        prompt = prompt_ids(
            tokenizer, prompt_format, question["question"], enable_thinking=enable_thinking
        )
        if len(prompt) + len(answer) + 1 > max_length:
            num_too_long += 1
            continue
        used.append(question)
        examples.append(Example(question["question_id"], prompt, [*answer, end]))
    if not examples:
        raise UserError(_why_none(num_without, num_too_long, max_length))
    answers = [
        start
        + tokenizer.decode(
            example.answer_ids[:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        for example in examples
    ]
    check_full_marks(used, answers, style)
    return ExampleSet(examples, num_without, num_too_long)


def _answer_start(
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    question: str,
    enable_thinking: bool,
) -> str:
    """What the prompt holds of the answer; UserError where that is the opening of a thought."""
    text = prompt_text(tokenizer, prompt_format, question, enable_thinking=enable_thinking)
    start = answer_start(text)
    if start == OPENING_THOUGHT:
        raise UserError(
            "the chat template opens a thought and reference solutions have none: they would teach "
            "the model not to think. Set model.enable_thinking = false if the template knows it; "
            "else sft.samples with sft.reference_weight = 0, or warmstart.method = 'opd' or 'none'"
        )
    return start


def _why_none(num_without: int, num_too_long: int, max_length: int) -> str:
    if num_without and not num_too_long:
        return (
            f"none of the {num_without} warm-up questions has a reference solution: SFT needs "
            "them; use a source that has them, or warmstart.method = 'opd' or 'none'"
        )
    return (
        f"no SFT example is left: {num_without} questions have no reference solution, "
        f"{num_too_long} examples are longer than sft.max_length = {max_length}"
    )


def by_length_within_batches(
    order: Sequence[int], lengths: Sequence[int], batch_size: int
) -> list[int]:
    """`order` with each batch's examples sorted by length, shortest first.

    The batches stay what they are, so training does too; micro-batches hold less padding.
    """
    return [
        index
        for start in range(0, len(order), batch_size)
        for index in sorted(order[start : start + batch_size], key=lambda i: lengths[i])
    ]
