"""What the comparison will be able to see, before and after the questions are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.config.load import load_config
from ratchet.evaluation.power import counts_in, detectable_differences, expected_counts, num_train
from ratchet.evaluation.stats import mcnemar_power
from tests.support.made_up import artifact, question


def test_sizes_come_from_the_configuration_and_then_from_the_questions(tmp_path: Path) -> None:
    assert expected_counts(load_config("demo")) == {"symbolic": 400, "symbolic-heldout": 200}
    sources = (
        'questions.test=[{kind="gsm8k"}, {kind="math500", offset=400, limit=300}, '
        '{kind="gsm8k", name="some", split="train"}, {kind="gsm8k", name="few", limit=20}]'
    )
    config = load_config("demo", [sources])
    assert expected_counts(config) == {"gsm8k": 1319, "math500": 100, "some": 7473, "few": 20}
    rows = [question(f"q{i}", role="test", source="ab"[i % 3 == 0]) for i in range(9)]
    rows += [question("q9", role="train", source="a")]
    found = artifact(tmp_path, "questions", {"questions": rows})
    assert counts_in(found) == {"b": 3, "a": 6}
    assert num_train(config, found) == 1
    train = 'questions.train=[{kind="gsm8k", offset=7000}, {kind="svamp", limit=100}]'
    assert num_train(load_config("demo", [train]), None) == 473 + 100
    unknown = 'questions.train=[{kind="gsm8k"}, {kind="file", path="x.jsonl"}]'
    assert num_train(load_config("demo", [unknown]), None) is None


def test_the_sentence_states_what_mcnemar_finds_four_times_in_five() -> None:
    (line,) = detectable_differences({"gsm8k": 1319}, 0.95)
    assert line == (
        "gsm8k, 1,319 questions: 2.5 points if 10% of the answers change, 4.3 if 30% do"
    )
    assert mcnemar_power(1319, 0.1, 0.025) == pytest.approx(0.8, abs=0.02)
    assert mcnemar_power(1319, 0.3, 0.043) == pytest.approx(0.8, abs=0.02)
    assert detectable_differences({"empty": 0}, 0.95) == []
