"""Where the model of an artifact lies, and how it is loaded and saved.

Two kinds of artifacts hold a model: the 'model' stage's (a `model.json` that points at a hub id or
folder, or at `checkpoint` in the artifact) and those of training stages (`checkpoint/`). Only
safetensors are read and code that comes with a model never runs. The dtype is always given: the
one a checkpoint was saved in decides nothing. torch and transformers are imported inside the
functions, because light stages need the tokenizer only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.models.check import context_length
from ratchet.store.store import Artifact

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKPOINT = "checkpoint"
MODEL_FILE = "model.json"
TURN_MARK = "x1y2z3"


@dataclass(frozen=True)
class ModelLocation:
    """What `from_pretrained` is given."""

    path: str
    """Absolute folder, or hub id."""
    revision: str | None
    """Hub commit; None for a folder."""


def model_location(artifact: Artifact) -> ModelLocation:
    """Where the artifact's model lies."""
    file = artifact.folder / MODEL_FILE
    if not file.is_file():
        return ModelLocation(str(artifact.path(CHECKPOINT)), None)
    facts = json.loads(file.read_text(encoding="utf-8"))
    if facts["path"] == CHECKPOINT:
        return ModelLocation(str(artifact.path(CHECKPOINT)), None)
    return ModelLocation(facts["path"], facts["revision"])


def load_tokenizer(artifact: Artifact) -> PreTrainedTokenizerBase:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    where = model_location(artifact)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        where.path, revision=where.revision, trust_remote_code=False
    )
    return tokenizer


def model_context(artifact: Artifact) -> int | None:
    """The model's own context limit in tokens; None where its config names none."""
    where = model_location(artifact)
    file = artifact.folder / MODEL_FILE
    if file.is_file():
        found: int | None = json.loads(file.read_text(encoding="utf-8"))["context"]
        return found
    config = json.loads((Path(where.path) / "config.json").read_text(encoding="utf-8"))
    return context_length(config)


def load_model(artifact: Artifact, *, dtype: str, attention: str) -> PreTrainedModel:
    """The model in `dtype` ('float32' or 'bfloat16'), on the CPU, in evaluation mode.

    `attention` is the kernel: 'eager' or 'sdpa'.
    """
    import torch
    from transformers import AutoModelForCausalLM

    where = model_location(artifact)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        where.path,
        revision=where.revision,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        use_safetensors=True,
        trust_remote_code=False,
    )
    return model


def save_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write model, tokenizer and generation config to `folder` as safetensors and JSON.

    Of the generation config only the token ids stay: a temperature or top_p in it would be taken
    up silently by whatever samples the checkpoint later.
    """
    from transformers import GenerationConfig

    old = model.generation_config
    eos = tokenizer.eos_token_id if old is None or old.eos_token_id is None else old.eos_token_id
    pad = tokenizer.pad_token_id if old is None or old.pad_token_id is None else old.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=pad
    )
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def _as_ids(value: Any) -> list[int]:
    """Token ids out of a config value: one, several or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [int(value)]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The added token that the chat template writes after an assistant's message, if it does."""
    if tokenizer.chat_template is None:
        return []
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": TURN_MARK}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    after = text.rpartition(TURN_MARK)[2]
    ids = tokenizer.encode(after, add_special_tokens=False) if after else []
    return [ids[0]] if ids and ids[0] in tokenizer.added_tokens_decoder else []


def stop_token_ids(artifact: Artifact, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion: end of text by the model's generation config and tokenizer,
    end of turn by the chat template. Sorted."""
    from transformers import GenerationConfig

    where = model_location(artifact)
    found = {*_as_ids(tokenizer.eos_token_id), *turn_end(tokenizer)}
    try:
        config = GenerationConfig.from_pretrained(where.path, revision=where.revision)
    except OSError:  # it has none
        return tuple(sorted(found))
    return tuple(sorted(found | set(_as_ids(config.eos_token_id))))
