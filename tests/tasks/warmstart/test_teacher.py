"""The teacher: same tokenizer or refused, spare vocabulary rows without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import normalizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ratchet.errors import UserError
from ratchet.verifier import Style
from tasks.training.dev_check import EvalSet
from tasks.warmstart.teacher import (
    fit_vocabulary,
    load_teacher,
    tokenizer_difference,
)
from tests.support.tiny_model import tiny_model, tiny_tokenizer

TEXT = "Ann has 3 pens and buys 12 more."


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = tiny_tokenizer().encode(TEXT, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits[0]


def with_merges(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with two merged tokens and the given order of merges."""
    import json

    from tokenizers import Tokenizer

    found = tiny_tokenizer()
    state = json.loads(found.backend_tokenizer.to_str())
    state["added_tokens"] = []
    state["model"]["vocab"] |= {"an": 256, "nd": 257}
    state["model"]["merges"] = merges
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


def test_equal_tokenizers_have_no_difference() -> None:
    other = tiny_tokenizer()
    other.chat_template = "{{ messages[0]['content'] }}"
    assert tokenizer_difference(tiny_tokenizer(), other) is None


def test_the_first_differing_id_is_named() -> None:
    found = tokenizer_difference(tiny_tokenizer(("<a>",)), tiny_tokenizer(("<b>",)))
    assert found == "id 261 is '<a>' for the student and '<b>' for the teacher"
    found = tokenizer_difference(tiny_tokenizer(), tiny_tokenizer(("<b>",)))
    assert found == "id 261 is unused for the student and '<b>' for the teacher"


def test_another_order_of_merges_is_a_difference() -> None:
    one, two = with_merges([("a", "n"), ("n", "d")]), with_merges([("n", "d"), ("a", "n")])
    assert one.get_vocab() == two.get_vocab()
    assert one.encode("and") != two.encode("and")
    found = tokenizer_difference(one, two)
    assert found == "entry 0 of its merges is ['a', 'n'] and ['n', 'd']"


def test_another_normalizer_is_a_difference() -> None:
    other = tiny_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert "normalizer" in str(tokenizer_difference(tiny_tokenizer(), other))


def test_cutting_spare_rows_keeps_every_logit_of_a_token() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, vocab_size=300)
    before = logits(model)
    fit_vocabulary(model, 270, num_tokens=len(tokenizer))
    after = logits(model)
    assert (before.shape[1], after.shape[1], model.config.vocab_size) == (300, 270, 270)
    real = slice(0, len(tokenizer))
    assert torch.equal(before[:, real].log_softmax(-1), after[:, real].log_softmax(-1))


def test_added_rows_have_no_probability() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    before = logits(model).log_softmax(-1)
    fit_vocabulary(model, 300, num_tokens=len(tokenizer))
    after = logits(model).log_softmax(-1)
    assert (model.config.vocab_size, after.shape[1]) == (300, 300)
    assert torch.allclose(before, after[:, : len(tokenizer)], rtol=0, atol=1e-6)
    assert after[:, len(tokenizer) :].exp().max() < 1e-20
    assert torch.isfinite(after).all()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tiny_tokenizer(("<new>",))
    tiny_model(other).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"another tokenizer.*id 261 is unused.*'<new>'"):
        load(tmp_path)


def test_a_missing_teacher_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"opd\.teacher = .* can't be loaded") as caught:
        load(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


def load(path: Path) -> PreTrainedModel:
    return load_teacher(
        str(path), None, tiny_tokenizer(), vocab_size=261, dtype="float32", attention="eager"
    )


def test_accuracy_counts_strict_and_lenient() -> None:
    exact = "<start_working_out>2 + 2 = 4<end_working_out><SOLUTION>4</SOLUTION>"
    eval_set = EvalSet([[1]] * 4, ["4"] * 4, Style.TAGS, max_tokens=9, prefilled="")
    assert eval_set.accuracy([exact, f"Well: {exact}", "no idea", "It is 5."]) == (0.25, 0.5)
