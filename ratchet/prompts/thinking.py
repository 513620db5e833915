"""Whether a model can be told to think before it answers.

Chat templates of such models know a variable `enable_thinking`. One that doesn't know it renders
the same prompt either way, so asking it to think would measure nothing and say it had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.config.run import PromptFormat
from ratchet.errors import UserError
from ratchet.prompts import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSED = "</think>"


def has_switch(tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> bool:
    """Whether the prompt differs with thinking on and off."""
    off, on = (
        prompt_text(tokenizer, prompt_format, "1 + 1?", enable_thinking=thinking)
        for thinking in (False, True)
    )
    return off != on


def check_thinking(
    tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat, setting: str
) -> None:
    """UserError when `setting` asks for thinking and the model can't be told to, or when the end of
    a thought would be lost in decoding, so that the thought would be taken for the answer."""
    if not has_switch(tokenizer, prompt_format):
        why = "doesn't know enable_thinking" if tokenizer.chat_template else "is missing"
        raise UserError(
            f"{setting} asks for thinking, but the model's chat template {why}: the prompt would "
            "be the same; leave it off"
        )
    ids = tokenizer.encode(CLOSED, add_special_tokens=False)
    if CLOSED not in tokenizer.decode(ids, skip_special_tokens=True):
        raise UserError(
            f"{setting} asks for thinking, but this tokenizer drops {CLOSED} as a special token, "
            "so a thought can't be told from its answer: leave it off"
        )
