"""The teacher of on-policy distillation: same tokenizer proven, vocabulary made to fit.

Distillation compares two distributions over token ids, so an id must mean the same to both models.
Equal tokenizers may still come with embeddings of different height: Qwen2.5-7B has 152,064 rows and
Qwen2.5-0.5B 151,936, while their tokenizer knows 151,665 tokens. Rows that no token uses are then
cut off, or added with a logit so low that they have no probability; what the teacher says about
real tokens stays the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ratchet.errors import UserError

UNUSED_LOGIT = -50.0
"""Logit of an added row: a probability of e⁻⁵⁰ at most beside real logits of zero and above."""


def load_teacher(
    path: str,
    revision: str | None,
    student: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    dtype: str,
    attention: str,
) -> PreTrainedModel:
    """The teacher with its vocabulary fitted to `vocab_size` rows.

    UserError when it can't be loaded or its tokenizer isn't the student's.
    """
    where = {} if Path(path).is_dir() else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **where)
    except (OSError, ValueError) as error:
        raise UserError(
            f"opd.teacher = {path!r} can't be loaded: {str(error).splitlines()[0]}. Give a hub id "
            "or a directory with model and tokenizer"
        ) from error
    difference = tokenizer_difference(student, tokenizer)
    if difference is not None:
        raise UserError(
            f"opd.teacher = {path!r} has another tokenizer than the student: {difference}. "
            "Distillation compares token by token; choose a teacher of the student's family"
        )
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=attention, **where
    )
    fit_vocabulary(model, vocab_size, num_tokens=max(student.get_vocab().values()) + 1)
    return model


def tokenizer_difference(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> str | None:
    """The first thing in which two tokenizers differ, or None if they map every text alike.

    Compared: the token of every id (added tokens included), then the merges and all other steps
    of the tokenizer's pipeline. Chat templates and padding settings may differ.
    """
    ours = {index: token for token, index in student.get_vocab().items()}
    theirs = {index: token for token, index in teacher.get_vocab().items()}
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            return (
                f"id {index} is {_named(ours.get(index))} for the student and "
                f"{_named(theirs.get(index))} for the teacher"
            )
    return _pipeline_difference(_pipeline(student), _pipeline(teacher))


def _named(token: str | None) -> str:
    return "unused" if token is None else repr(token)


def _pipeline(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The steps that turn text into ids, as the tokenizers library writes them."""
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    model = found["model"]
    steps = {name: found[name] for name in ("normalizer", "pre_tokenizer", "decoder")}
    steps["added tokens"] = [(token["id"], token["content"]) for token in found["added_tokens"]]
    steps["merges"] = model.get("merges")
    steps["model"] = {
        name: value for name, value in model.items() if name not in ("vocab", "merges")
    }
    return steps


def _pipeline_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    for name, mine in ours.items():
        other = theirs[name]
        if mine == other:
            continue
        if isinstance(mine, list) and isinstance(other, list):
            for index, pair in enumerate(zip(mine, other, strict=False)):
                if pair[0] != pair[1]:
                    return f"entry {index} of its {name} is {pair[0]} and {pair[1]}"
            return f"it has {len(mine)} and {len(other)} {name}"
        return f"its {name} is {json.dumps(mine)} and {json.dumps(other)}"
    return None


def fit_vocabulary(model: PreTrainedModel, vocab_size: int, *, num_tokens: int) -> None:
    """Give `model` embeddings of `vocab_size` rows; rows from `num_tokens` on are no tokens.

    Cutting rows leaves every logit of a token as it was. Added rows have the logit `UNUSED_LOGIT`,
    through a bias on the head.
    """
    have = model.config.get_text_config().vocab_size
    assert num_tokens <= min(have, vocab_size), (num_tokens, have, vocab_size)
    if have == vocab_size:
        return
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    if vocab_size < have:
        return
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[have:] = 0
        bias = torch.zeros(vocab_size, dtype=head.weight.dtype, device=head.weight.device)
        if head.bias is not None:
            bias[:have] = head.bias[:have]
        bias[have:] = UNUSED_LOGIT
    head.bias = torch.nn.Parameter(bias)
