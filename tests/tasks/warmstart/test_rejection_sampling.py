"""Verified-right samples as warm-up data: which are taken, how they are mixed in."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.config.load import build_config
from ratchet.config.run import PromptFormat, SftConfig
from ratchet.errors import UserError
from ratchet.pipeline.dag import nodes
from ratchet.prompts import prompt_ids
from tasks.runtime.context import StageContext
from tasks.warmstart.rejection_sampling import SampleSet, mixed_order, pick, right_samples
from tests.support.made_up import artifact
from tests.support.tiny_model import END, tiny_tokenizer
from tests.support.tiny_warmstart import SFT, questions, run_sft, selection, stage_context

WEIGHTS = {"exact_check": 2.0, "step_check": 0.5}
TAGGED = "<start_working_out>\n{}\n<end_working_out>\n<SOLUTION>{}</SOLUTION>"
# Samples of q1 (always right) in the order drawn: text, strict, lenient, step_check, truncated.
DRAWN = {
    "q1": [
        (TAGGED.format("1 + 2 = 3", 3), True, True, 1.0, False),
        (TAGGED.format("3", 3), True, True, 0.0, False),
        (TAGGED.format("1 + 2 = 3", 3), True, True, 1.0, False),
        ("It is 3.", False, True, None, False),
    ],
    "q2": [("5", False, False, None, False)] * 4,
    "q3": [
        (TAGGED.format("one and two and three", 5), True, True, None, True),
        (TAGGED.format("3 + 2 is 5", 5), True, True, 0.5, False),
        (TAGGED.format("3+2=5", 5), True, True, 0.5, False),
        ("no", False, False, None, False),
    ],
}


def score_rows(question_id: str) -> list[dict[str, Any]]:
    tokenizer = tiny_tokenizer()
    return [
        {
            "question_id": question_id,
            "sample_index": index,
            "status": "ok",
            "extracted": "3",
            "strict": strict,
            "lenient": lenient,
            "truncated": truncated,
            "num_tokens": len(tokenizer.encode(text)) + 1,
            "reward_exact_check": float(strict),
            "reward_step_check": steps,
        }
        for index, (text, strict, lenient, steps, truncated) in enumerate(DRAWN[question_id])
    ]


def with_samples(folder: Path) -> StageContext:
    """The tiny stage; q0 goes to RL, q1 to q3 have samples."""
    rows = questions(4)
    ctx = stage_context(folder, rows, selection(rows, rl=1))
    tokenizer = tiny_tokenizer()
    completions = [
        {
            "question_id": name,
            "sample_index": index,
            "prompt_format": "tags_short",
            "text": sample[0],
            "token_ids": tokenizer.encode(sample[0] + END),
            "num_tokens": len(tokenizer.encode(sample[0] + END)),
            "finish_reason": "length" if sample[4] else "stop",
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 99,
            "seed": 0,
            "model_key": "m",
        }
        for name, samples in DRAWN.items()
        for index, sample in enumerate(samples)
    ]
    scores = [row for name in DRAWN for row in score_rows(name)]
    inputs = {
        "completions": artifact(folder / "drawn", "presample", {"completions": completions}),
        "scores": artifact(
            folder / "scored", "score", {"scores": scores}, summary={"reward_weights": WEIGHTS}
        ),
    }
    return replace(ctx, inputs={**ctx.inputs, **inputs})


def taken(ctx: StageContext, **fields: Any) -> SampleSet:
    rows = [row for row in questions(4) if row["question_id"] != "q0"]
    sft = SftConfig.model_validate({"samples": "best"} | fields)
    return right_samples(
        ctx, rows, tiny_tokenizer(), PromptFormat.TAGS_SHORT, sft, enable_thinking=False
    )


def test_the_best_the_shortest_or_all() -> None:
    rows = [row for row in score_rows("q1") if row["strict"]]
    assert [row["sample_index"] for row in pick(rows, "best", WEIGHTS)] == [0]
    assert [row["sample_index"] for row in pick(rows, "shortest", WEIGHTS)] == [1]
    assert [row["sample_index"] for row in pick(rows, "all", WEIGHTS)] == [0, 1, 2]
    equal = [row for row in score_rows("q3") if row["strict"] and not row["truncated"]]
    assert [row["sample_index"] for row in pick(equal, "best", WEIGHTS)] == [2]  # the shorter


def test_right_samples_are_learnt_as_they_were_said(tmp_path: Path) -> None:
    ctx = with_samples(tmp_path)
    found = taken(ctx, samples="all")
    tokenizer = tiny_tokenizer()
    # q1's third sample says what its first does; q3's first was cut off.
    assert [(e.question_id, tokenizer.decode(e.answer_ids)) for e in found.examples] == [
        ("q1", TAGGED.format("1 + 2 = 3", 3) + END),
        ("q1", TAGGED.format("3", 3) + END),
        ("q3", TAGGED.format("3 + 2 is 5", 5) + END),
        ("q3", TAGGED.format("3+2=5", 5) + END),
    ]
    asked = prompt_ids(tokenizer, PromptFormat.TAGS_SHORT, "What is 1 + 2?", enable_thinking=False)
    assert found.examples[0].labels[: len(asked)] == [-100] * len(asked)
    assert found.examples[0].input_ids[: len(asked)] == asked
    assert found.summary() == {
        "num_sample_examples": 4,
        "num_sample_questions": 2,
        "num_samples_right": 5,
        "num_samples_right_elsewhere": 1,
        "num_samples_too_long": 0,
    }
    one = taken(ctx, samples="shortest", max_examples=1)
    assert [tokenizer.decode(e.answer_ids) for e in one.examples] == [TAGGED.format("3", 3) + END]


def test_samples_too_long_are_left_out_whole(tmp_path: Path) -> None:
    ctx = with_samples(tmp_path)
    lengths = [len(example.input_ids) for example in taken(ctx).examples]
    found = taken(ctx, max_length=min(lengths))
    assert [len(example.input_ids) for example in found.examples] == [min(lengths)]
    assert found.num_too_long == 1
    with pytest.raises(UserError, match=r"all 2 are longer than sft\.max_length = 20"):
        taken(ctx, max_length=20)


def test_no_right_sample_says_how_to_get_some(tmp_path: Path) -> None:
    rows = [row for row in questions(4) if row["question_id"] == "q2"]
    sft = SftConfig(samples="best")
    with pytest.raises(UserError, match=r"none of the samples of the 1 warm-up .*warmup_share"):
        right_samples(
            with_samples(tmp_path),
            rows,
            tiny_tokenizer(),
            PromptFormat.TAGS_SHORT,
            sft,
            enable_thinking=False,
        )


def test_both_kinds_are_spread_over_one_another() -> None:
    sft = SftConfig(epochs=2, samples="all", samples_weight=0.5)
    order = mixed_order(4, 8, sft, seed=0)  # 8 rows of each kind
    assert Counter(order) == Counter([*range(4)] * 2 + [*range(4, 12)])
    for start in range(0, 16, 4):
        assert sum(index < 4 for index in order[start : start + 4]) == 2
    only = mixed_order(0, 3, SftConfig(epochs=1, samples="all", reference_weight=0), seed=0)
    assert sorted(only) == [0, 1, 2]


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(ValidationError, match="reference_weight = 0 leaves nothing"):
        SftConfig(reference_weight=0)


def test_a_stage_learns_from_both(tmp_path: Path) -> None:
    ctx = with_samples(tmp_path)
    sft = SFT.model_copy(update={"epochs": 4, "samples": "best", "samples_weight": 0.5})
    result = run_sft(ctx, sft)
    # 3 references × 4 and 2 samples × 2: 16 rows
    assert (result.summary["num_examples"], result.summary["num_steps"]) == (5, 4)
    assert result.summary["num_sample_questions"] == 2
    assert "3 reference solutions (0 questions have none, 0 are too long) and 2 right samples" in (
        result.markdown
    )
    assert result.summary["final_loss"] < result.summary["first_loss"]


OPD = ["warmstart.method=opd", "opd.teacher=t"]
MINIMAL = {"questions": {"train": [{"kind": "symbolic"}], "test": [{"kind": "symbolic"}]}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["warmstart.data=source"], "sft.samples = 'best' needs warmstart.data = 'dropped'"),
        (["rollouts.path=x"], "sft.samples = 'best' needs presampling"),
        (["sft.samples=none", "sft.reference_weight=0"], "leaves nothing to learn"),
        (["warmstart.method=none", "filter.warmup_share=0.5"], "filter.warmup_share holds"),
        (
            ["sft.samples=none", "warmstart.data=source", "filter.warmup_share=0.5"],
            "filter.warmup_share holds questions back",
        ),
    ],
)
def test_settings_without_samples_or_use_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_config(deepcopy(MINIMAL), ["sft.samples=best", *settings])
    assert words in str(caught.value)


def test_the_stage_reads_samples_only_where_it_learns_from_them() -> None:
    found = [
        next(
            node
            for node in nodes(build_config(deepcopy(MINIMAL), settings))
            if node.name == "warmstart"
        )
        for settings in ([], ["sft.samples=best"], ["sft.samples=best", *OPD])
    ]
    plain, sampled, distilled = (set(node.inputs) for node in found)
    assert sampled - plain == {"completions", "scores"}
    assert (found[1].inputs["completions"], found[1].inputs["scores"]) == ("presample", "score")
    assert distilled == plain
