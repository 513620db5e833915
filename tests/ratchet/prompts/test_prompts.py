"""Prompt formats: their texts, how they are rendered, and what must not break them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ratchet import prompts
from ratchet.config.run import PromptFormat
from ratchet.errors import UserError
from ratchet.verifier.types import Style

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}"
)


def tokenizer(template: str | None, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token per byte, and `<s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<s>"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    made.chat_template = template
    return made


def test_short_formats_are_exactly_these() -> None:
    expected = {
        PromptFormat.TAGS_SHORT: "1 + 1?\nAnswer in tags.",
        PromptFormat.HASH_SHORT: "1 + 1?\nAnswer after ####.",
        PromptFormat.BOXED_SHORT: "1 + 1?\nAnswer in a box.",
    }
    for prompt_format, content in expected.items():
        assert prompts.messages(prompt_format, "1 + 1?") == [{"role": "user", "content": content}]


@pytest.mark.parametrize("prompt_format", list(PromptFormat))
def test_every_format_is_well_formed(prompt_format: PromptFormat) -> None:
    parts = prompts.parts(prompt_format)
    assert [role for role, _ in parts] in (["user"], ["system", "user"])
    assert sum(text.count(prompts.QUESTION) for _, text in parts) == 1
    assert prompts.QUESTION in parts[-1][1]
    assert all(text == text.strip() for _, text in parts)


@pytest.mark.parametrize("prompt_format", list(PromptFormat))
def test_every_format_demands_its_style(prompt_format: PromptFormat) -> None:
    """What the text asks for is where the verifier will look."""
    text = " ".join(message["content"] for message in prompts.messages(prompt_format, "Q"))
    marks = {
        Style.TAGS: ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"),
        Style.HASH: ("####",),
        Style.BOXED: (r"\boxed{}",),
    }
    style = prompts.STYLE_OF[prompt_format]
    if not prompt_format.endswith("_short"):
        assert all(mark in text for mark in marks[style])
    if prompt_format is PromptFormat.TAGS_EXAMPLE:
        assert r"Do not use \boxed{}" in text
        assert "<SOLUTION>17</SOLUTION>" in text  # 6 * 8 - 31


def test_braces_in_a_question_survive() -> None:
    question = r"Simplify $\frac{1}{x}$ of {question} and {0} and %s \boxed{3}"
    for prompt_format in PromptFormat:
        content = prompts.messages(prompt_format, question)[-1]["content"]
        assert content.count(question) == 1
        before, after = prompts.parts(prompt_format)[-1][1].split(prompts.QUESTION)
        assert content == before + question + after


def test_chat_template_is_applied() -> None:
    made = tokenizer(TEMPLATE)
    text = prompts.prompt_text(made, PromptFormat.TAGS_SHORT, "Q", enable_thinking=False)
    assert text == "<|user|>Q\nAnswer in tags.\n<|assistant|><think></think>"
    text = prompts.prompt_text(made, PromptFormat.TAGS_SHORT, "Q", enable_thinking=True)
    assert text == "<|user|>Q\nAnswer in tags.\n<|assistant|>"
    text = prompts.prompt_text(made, PromptFormat.TAGS, "Q", enable_thinking=True)
    assert text.startswith("<|system|>You solve maths problems.")
    assert text.endswith("\n<|user|>Q\n<|assistant|>")


def test_template_writes_the_special_tokens() -> None:
    """The template's own `<s>` is one token, and no second one is put in front."""
    made = tokenizer("<s>{{ messages[0].content }}", bos=True)
    ids = prompts.prompt_ids(made, PromptFormat.HASH_SHORT, "Q", enable_thinking=False)
    assert ids[0] == made.bos_token_id
    assert ids.count(made.bos_token_id) == 1
    assert made.decode(ids[1:]) == "Q\nAnswer after ####."


@pytest.mark.parametrize("bos", [True, False])
def test_model_without_template(bos: bool) -> None:
    made = tokenizer(None, bos=bos)
    assert prompts.prompt_text(made, PromptFormat.TAGS_SHORT, "Q", enable_thinking=False) == (
        "Q\nAnswer in tags.\n"
    )
    text = prompts.prompt_text(made, PromptFormat.TAGS, "Q", enable_thinking=False)
    assert text.endswith("the two parts.\n\nQ\n")
    ids = prompts.prompt_ids(made, PromptFormat.TAGS_SHORT, "Q", enable_thinking=False)
    assert len(ids) == len("Q\nAnswer in tags.\n") + bos
    assert (ids[0] == made.bos_token_id) is bos


def test_template_that_refuses_a_system_message() -> None:
    made = tokenizer(NO_SYSTEM)
    assert prompts.prompt_text(made, PromptFormat.BOXED_SHORT, "Q", enable_thinking=False)
    with pytest.raises(UserError, match=r"System role not supported.*tags_short"):
        prompts.prompt_text(made, PromptFormat.TAGS_EXAMPLE, "Q", enable_thinking=False)


def test_what_a_template_writes_of_the_answer() -> None:
    assert prompts.answer_start("<|assistant|><start_working_out>\n") == "<start_working_out>"
    assert prompts.answer_start("<|assistant|><think>\n") == "<think>"
    assert prompts.answer_start("<|assistant|><think>\n\n</think>\n\n") == ""
    assert prompts.answer_start("<start_working_out> and <end_working_out>\n<|assistant|>") == ""


def test_fingerprints_differ() -> None:
    assert len({prompts.fingerprint(prompt_format) for prompt_format in PromptFormat}) == 7
