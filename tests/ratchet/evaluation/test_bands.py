"""Bands by measured pass rate: their edges, and that luck in the banding moves no difference."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import EvaluateConfig, PromptConfig, RunConfig, SourceConfig, SourceKind
from ratchet.errors import UserError
from ratchet.evaluation.bands import BANDING, band_order, pass_rate_band
from ratchet.evaluation.comparison import slices
from ratchet.pipeline.dag import nodes
from ratchet.store.schemas import read_table
from tasks.stages.evaluate import requests_for
from tests.ratchet.evaluation.test_comparison import answers, run
from tests.support.made_up import question

LUCK = [f"{a}{b}" for a, b in product("+-", repeat=2)]


def test_band_edges() -> None:
    names = [pass_rate_band(right, 8) for right in range(9)]
    assert names == [
        "pass rate 0",
        "pass rate 0 to 0.25",
        "pass rate 0 to 0.25",
        "pass rate 0.25 to 0.5",
        "pass rate 0.25 to 0.5",
        "pass rate 0.5 to 0.75",
        "pass rate 0.5 to 0.75",
        "pass rate 0.75 to 1",
        "pass rate 1",
    ]
    assert sorted(set(names), key=band_order) == list(dict.fromkeys(names))
    assert pass_rate_band(1, 3) == "pass rate 0.25 to 0.5"
    assert pass_rate_band(2, 3) == "pass rate 0.5 to 0.75"


def test_bands_of_sources_stand_in_order() -> None:
    for bands in (
        ["level 1", "level 2", "level 5"],
        ["difficulty 2", "difficulty 9", "difficulty 10"],
        ["1 step", "2 steps", "8+ steps", "unannotated"],
    ):
        parts = slices(["b"] * len(bands), bands[::-1])
        assert [part.band for part in parts] == ["all", *bands]


def by_band(tmp_path: Path, banding: dict[str, str], baseline: dict[str, str]) -> dict[str, Any]:
    """Difference and number of questions of each band; the trained model is as good as the start
    model: of the two samples of each question it gets one right."""
    rows = [question(name, role="test", band="source's own") for name in baseline]
    same = dict.fromkeys(baseline, "+-")
    greedy = dict.fromkeys(baseline, "+")
    variants = {
        "baseline": answers("baseline", greedy)
        + answers("baseline", baseline, "sampled")
        + answers("baseline", banding, BANDING),
        "rl": answers("rl", greedy) + answers("rl", same, "sampled"),
    }
    _, out = run(tmp_path, variants, rows, samples=2)
    table = read_table(out / "comparison.parquet", "comparison").to_pylist()
    return {
        row["band"]: (row["num_questions"], row["value_a"], row["difference"])
        for row in table
        if (row["metric"], row["decoding"]) == ("lenient", "sampled")
    }


def test_bands_of_other_samples_carry_no_luck_into_the_comparison(tmp_path: Path) -> None:
    """16 questions that the start model gets right half the time: every outcome of two samples to
    make bands of with every outcome of two samples to compare, each once."""
    both = {f"q{i}": pair for i, pair in enumerate(product(LUCK, LUCK))}
    banding = {name: pair[0] for name, pair in both.items()}
    compared = {name: pair[1] for name, pair in both.items()}
    assert by_band(tmp_path / "ours", banding, compared) == {
        "all": (16, 0.5, 0.0),
        "pass rate 0": (4, 0.5, 0.0),
        "pass rate 0.25 to 0.5": (8, 0.5, 0.0),
        "pass rate 1": (4, 0.5, 0.0),
    }
    # bands of the very samples that are compared: the hard ones gain what the easy ones lose
    assert by_band(tmp_path / "biased", compared, compared) == {
        "all": (16, 0.5, 0.0),
        "pass rate 0": (4, 0.0, 0.5),
        "pass rate 0.25 to 0.5": (8, 0.5, 0.0),
        "pass rate 1": (4, 1.0, -0.5),
    }


def test_a_question_without_samples_for_its_band_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no samples to make bands of for 1 of 2 questions"):
        by_band(tmp_path, {"q0": "++"}, {"q0": "++", "q1": "+-"})


def test_only_the_start_model_is_sampled_for_bands_and_anew() -> None:
    prompt = PromptConfig()
    plans = requests_for([], prompt, EvaluateConfig(samples=4, band_samples=8))
    assert {name: (r.first_sample, r.num_samples) for name, r in plans.items()} == {
        "greedy": (0, 1), "sampled": (0, 4), "banding": (4, 8),
    }  # fmt: skip
    source = (SourceConfig(kind=SourceKind.SYMBOLIC),)
    config = RunConfig(
        questions={"train": source, "test": source}, evaluate=EvaluateConfig(band_samples=8)
    )
    wanted = {node.name: node.config(config).evaluate.band_samples for node in nodes(config)}
    assert wanted["evaluate.baseline"] == 8
    assert wanted["evaluate.rl"] == 0
