"""Prompt formats: how a question is put to a model, and where the answer must stand.

A format is a text file `<name>.txt` here. A line `[system]` or `[user]` on its own starts the text
of that message; the user part is required and `{question}` occurs once in the file. Line breaks
at the ends of a part are not part of it. Only that one mark is replaced: braces in the question
or in the instructions mean nothing.

A long instruction stands in front of the question where it can, so that a sampler's prefix cache
computes it once.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config.run import PromptFormat
from ratchet.errors import UserError
from ratchet.verifier.types import Style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STYLE_OF: dict[PromptFormat, Style] = {
    PromptFormat.GSM8K_HASH: Style.HASH,
    PromptFormat.TAGS: Style.TAGS,
    PromptFormat.TAGS_EXAMPLE: Style.TAGS,
    PromptFormat.BOXED: Style.BOXED,
    PromptFormat.TAGS_SHORT: Style.TAGS,
    PromptFormat.HASH_SHORT: Style.HASH,
    PromptFormat.BOXED_SHORT: Style.BOXED,
}
QUESTION = "{question}"
OPENING_TAG = "<start_working_out>"
OPENING_THOUGHT = "<think>"

_FOLDER = Path(__file__).parent


@cache
def parts(prompt_format: PromptFormat) -> tuple[tuple[str, str], ...]:
    """The (role, text) parts of a format, the place of the question still marked."""
    found: list[tuple[str, str]] = []
    for line in _text(prompt_format).splitlines():
        if line in ("[system]", "[user]"):
            found.append((line[1:-1], ""))
        else:
            role, text = found.pop()
            found.append((role, f"{text}{line}\n"))
    return tuple((role, text.strip("\n")) for role, text in found)


@cache
def _text(prompt_format: PromptFormat) -> str:
    return (_FOLDER / f"{prompt_format}.txt").read_text(encoding="utf-8")


def fingerprint(prompt_format: PromptFormat) -> str:
    """sha256 of the format's text and answer style, for artifact keys."""
    text = f"{STYLE_OF[prompt_format]}\n{_text(prompt_format)}"
    return hashlib.sha256(text.encode()).hexdigest()


def messages(prompt_format: PromptFormat, question: str) -> list[dict[str, str]]:
    """The chat that asks `question`: one user message, with a system message before it in some
    formats."""
    return [
        {"role": role, "content": question.join(text.split(QUESTION))}
        for role, text in parts(prompt_format)
    ]


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    question: str,
    *,
    enable_thinking: bool,
) -> str:
    """The text that the model continues.

    The chat template is applied up to where the assistant's turn starts. A model without one gets
    the messages as plain text, a blank line between them and a line break at the end.
    `enable_thinking` is passed to the template; templates that don't know it ignore it.
    UserError where the template refuses the messages.
    """
    from jinja2.exceptions import TemplateError

    chat = messages(prompt_format, question)
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in chat) + "\n"
    try:
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
        )
    except TemplateError as error:  # some templates raise on a system message
        roles = " and ".join(message["role"] for message in chat)
        raise UserError(
            f"the model's chat template refuses the {roles} messages of format "
            f"'{prompt_format}' ({error}): use a format without a system part, such as "
            f"'{PromptFormat.TAGS_SHORT}' or '{PromptFormat.GSM8K_HASH}'"
        ) from error
    return text


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    question: str,
    *,
    enable_thinking: bool,
) -> list[int]:
    """Token ids of `prompt_text`. Special tokens are those the template writes; without a
    template, the beginning-of-text token comes first if this tokenizer adds one."""
    text = prompt_text(tokenizer, prompt_format, question, enable_thinking=enable_thinking)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.chat_template is None and adds_bos(tokenizer):
        return [tokenizer.bos_token_id, *ids]
    return ids


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this tokenizer puts a beginning-of-text token in front of what it encodes."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a", add_special_tokens=True)[0] == bos


def answer_start(text: str) -> str:
    """What a rendered prompt already holds of the answer: the opening working tag or `<think>` at
    its end, which the completion then doesn't repeat; empty without either."""
    ending = text.rstrip()
    return next((mark for mark in (OPENING_TAG, OPENING_THOUGHT) if ending.endswith(mark)), "")
