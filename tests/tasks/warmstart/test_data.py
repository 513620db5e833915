"""What a warm-start learns from: questions, tokens, labels."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import PromptFormat, SourceConfig, SourceKind
from ratchet.errors import UserError
from ratchet.prompts import prompt_text
from ratchet.questions.load import load_source
from ratchet.questions.rewrite import rewrite_solution
from ratchet.verifier import Style
from tasks.runtime.context import StageContext
from tasks.training.seeds import training_order
from tasks.warmstart.data import (
    IGNORED,
    ExampleSet,
    build_examples,
    by_length_within_batches,
    check_full_marks,
    end_of_turn_id,
    warmup_questions,
)
from tests.support.made_up import artifact, context, question
from tests.support.tiny_model import END, tiny_tokenizer
from tests.support.tiny_warmstart import questions, selection

Rows = list[dict[str, Any]]


def examples(
    rows: Rows, *, max_length: int = 2000, limit: int | None = None, template: str | None = None
) -> ExampleSet:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return build_examples(
        rows,
        tokenizer,
        PromptFormat.TAGS_SHORT,
        enable_thinking=False,
        max_length=max_length,
        limit=limit,
    )


def stage(tmp_path: Path, rows: Rows, chosen: Rows | None = None) -> StageContext:
    inputs = {"questions": artifact(tmp_path / "q", "questions", {"questions": rows})}
    if chosen is not None:
        inputs["selection"] = artifact(tmp_path / "s", "filter", {"selection": chosen})
    return context(tmp_path, inputs)


def test_loss_is_on_the_answer_and_its_end_only() -> None:
    tokenizer = tiny_tokenizer()
    row = question("q", question="What is 2 + 2?")
    (example,) = examples([row]).examples
    asked = prompt_text(tokenizer, PromptFormat.TAGS_SHORT, "What is 2 + 2?", enable_thinking=False)
    assert asked == "<|user|>What is 2 + 2?\nAnswer in tags.<|assistant|>"
    assert tokenizer.decode(example.input_ids) == (
        asked + "<start_working_out>\n2 + 2 = 4\n<end_working_out>\n<SOLUTION>4</SOLUTION>" + END
    )
    num_prompt = len(tokenizer.encode(asked, add_special_tokens=False))
    assert example.labels[:num_prompt] == [IGNORED] * num_prompt
    assert example.labels[num_prompt:] == example.input_ids[num_prompt:]
    assert example.labels[-1] == tokenizer.eos_token_id


def test_an_opening_that_the_template_writes_is_not_learnt_again() -> None:
    tokenizer = tiny_tokenizer()
    opening = "<|assistant|><start_working_out>\n"
    template = tokenizer.chat_template.replace("<|assistant|>", opening)
    (example,) = examples([question("q", question="What is 2 + 2?")], template=template).examples
    assert tokenizer.decode(example.prompt_ids).endswith(opening)
    assert tokenizer.decode(example.answer_ids) == (
        "2 + 2 = 4\n<end_working_out>\n<SOLUTION>4</SOLUTION>" + END
    )
    thinking = tokenizer.chat_template.replace("<|assistant|>", "<|assistant|><think>")
    with pytest.raises(UserError, match="would teach the model not to think"):
        examples([question("q")], template=thinking)


def test_the_end_of_turn_is_what_the_template_writes() -> None:
    tokenizer = tiny_tokenizer(extra=("<|turn|>",))
    assert end_of_turn_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "'<|turn|>\n'")
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|turn|>")
    tokenizer.chat_template = None
    assert end_of_turn_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="could not learn to stop"):
        end_of_turn_id(tokenizer)


def test_examples_too_long_are_left_out_whole_and_counted() -> None:
    rows = questions(3)
    rows[1]["question"] += " Think well."
    lengths = [len(example.input_ids) for example in examples(rows).examples]
    found = examples(rows, max_length=lengths[0])
    assert [example.question_id for example in found.examples] == ["q0", "q2"]
    assert (found.num_too_long, found.num_without_solution) == (1, 0)
    assert [len(example.input_ids) for example in found.examples] == [lengths[0], lengths[2]]


def test_questions_without_a_solution_are_counted() -> None:
    rows = questions(3)
    rows[0]["reference_solution"] = None
    found = examples(rows, limit=1)
    assert [example.question_id for example in found.examples] == ["q1"]
    assert found.num_without_solution == 1
    for row in rows:
        row["reference_solution"] = None
    with pytest.raises(UserError, match="none of the 3 warm-up questions has a reference"):
        examples(rows)


def test_nothing_short_enough_is_an_error() -> None:
    with pytest.raises(UserError, match=r"10 examples are longer than sft\.max_length = 20"):
        examples(questions(), max_length=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gold": "four"}, "question q1 is not strictly right.*gold_unparseable.*'four'"),
        ({"reference_solution": "so <SOLUTION>4\n#### 4"}, "question q1 is not strictly right"),
    ],
)
def test_a_solution_without_full_marks_is_named(change: dict[str, str], message: str) -> None:
    rows = questions(3)
    rows[1] |= change
    with pytest.raises(UserError, match=message):
        examples(rows)


def test_dropped_questions_are_those_of_role_warmup(tmp_path: Path) -> None:
    rows = questions(4)
    found = warmup_questions(stage(tmp_path, rows, selection(rows, rl=3)), "dropped")
    assert [row["question_id"] for row in found] == ["q3"]


def test_a_question_of_the_rl_set_is_refused(tmp_path: Path) -> None:
    rows = questions(4)
    rows[3]["question"] = "what is  0 + 2?"  # q0 again, which RL has
    with pytest.raises(UserError, match=r"1 warm-up questions are in the RL set.*q3.*q0"):
        warmup_questions(stage(tmp_path, rows, selection(rows, rl=1)), "dropped")


def test_one_question_with_two_roles_is_refused(tmp_path: Path) -> None:
    rows = questions(2)
    chosen = selection(rows, rl=1)
    with pytest.raises(UserError, match="in the RL set too, such as q1"):
        warmup_questions(stage(tmp_path, rows, [*chosen, chosen[1] | {"role": "rl"}]), "dropped")


def test_nothing_dropped_is_an_error(tmp_path: Path) -> None:
    rows = questions(2)
    with pytest.raises(UserError, match="left no question for a warm-start"):
        warmup_questions(stage(tmp_path, rows, selection(rows, rl=2)), "dropped")


def test_source_questions_leave_out_training_questions(tmp_path: Path) -> None:
    rows = [
        *questions(2),
        question("w1", role="warmup", question="WHAT is 1 + 2?"),
        question("w2", role="warmup", question="What is 9 + 9?"),
        question("d1", role="dev", question="What is 8 + 8?"),
    ]
    found = warmup_questions(stage(tmp_path, rows), "source")
    assert [row["question_id"] for row in found] == ["w2"]


def test_only_training_questions_to_warm_up_on_is_an_error(tmp_path: Path) -> None:
    rows = [*questions(2), question("w1", role="warmup", question="What is 1 + 2?")]
    with pytest.raises(UserError, match=r"all 1 of questions\.warmup are also"):
        warmup_questions(stage(tmp_path, rows), "source")


def test_training_order_is_whole_passes() -> None:
    order = training_order(5, 12, seed=3)
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:10]
    assert len(set(order[10:])) == 2
    assert order == training_order(5, 12, seed=3) != training_order(5, 12, seed=4)


def test_sorting_by_length_moves_nothing_to_another_batch() -> None:
    lengths = [9, 1, 5, 7, 3]
    assert by_length_within_batches([0, 1, 2, 3, 4, 0], lengths, 3) == [1, 2, 0, 4, 3, 0]
    assert by_length_within_batches([3, 1, 4, 2], lengths, 3) == [1, 4, 3, 2]


@pytest.mark.needs_shared
@pytest.mark.parametrize("style", [Style.TAGS, Style.HASH, Style.BOXED])
def test_all_rewritten_gsm8k_solutions_earn_full_marks(shared: Path, style: Style) -> None:
    source = SourceConfig(kind=SourceKind.GSM8K, path=str(shared / "data" / "gsm8k"))
    rows = [asdict(row) for row in load_source(source, "train")]
    assert len(rows) == 7473
    answers = [rewrite_solution(row["reference_solution"], row["gold"], style) for row in rows]
    check_full_marks(rows, answers, style)
