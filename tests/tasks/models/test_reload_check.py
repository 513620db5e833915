"""The reload check: passes what was saved whole, fails what was not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tasks.models.reload_check import compare, compare_reloaded, fixed_logprobs
from tests.support.tiny_model import tiny_model, tiny_tokenizer

TEXTS = ["Ann has 3 pens.", "Bob buys 12 nuts and eats 5."]


def saved(folder: Path) -> tuple:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def test_log_probabilities_of_a_model_that_knows_nothing() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    num_tokens = len(tokenizer.encode(TEXTS[0], add_special_tokens=False))
    found = fixed_logprobs(model, tokenizer, TEXTS[:1])
    assert found == pytest.approx([-math.log(len(tokenizer))] * (num_tokens - 1))


def test_differences_by_hand() -> None:
    check = compare([-1.0, -2.0, -3.0], [-1.0, -2.5, -2.0])
    assert (check.mean_difference, check.max_difference, check.num_tokens) == (0.5, 1.0, 3)


def test_a_nan_is_no_small_difference() -> None:
    check = compare([-1.0, -2.0], [-1.0, math.nan])
    assert math.isnan(check.mean_difference) and math.isnan(check.max_difference)


def test_a_whole_checkpoint_passes_exactly(tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path)
    before = fixed_logprobs(model, tokenizer, TEXTS)
    check = compare_reloaded(before, tmp_path, TEXTS, dtype="float32", attention="eager")
    assert check.max_difference == 0
    assert check.num_tokens == len(before)


def test_bfloat16_reload_differs_within_its_bound(tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path)
    before = fixed_logprobs(model, tokenizer, TEXTS)
    check = compare_reloaded(before, tmp_path, TEXTS, dtype="bfloat16", attention="eager")
    assert 0 < check.mean_difference < 0.05


def test_one_lost_layer_fails(tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path)
    with torch.no_grad():  # trained on, never saved
        model.model.layers[1].mlp.down_proj.weight += 0.05
    before = fixed_logprobs(model, tokenizer, TEXTS)
    with pytest.raises(RuntimeError, match="not the model that was trained"):
        compare_reloaded(before, tmp_path, TEXTS, dtype="float32", attention="eager")
