"""Write a trained model as a Hugging Face folder: whole, or its adapter, with a model card.

The folder is written beside its place, loaded again and compared, and only then renamed: an export
that is there says what the trained model said. What it is compared with is made another way where
that exists: a merged model with base and adapter kept apart, an adapter on its base with the merged
checkpoint.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from ratchet.errors import UserError
from ratchet.evaluation.model_card import comparison_of, model_card
from ratchet.store.lineage import ancestry
from ratchet.store.store import Artifact, Store
from tasks.models.checkpoints import CHECKPOINT, load_model, load_tokenizer, model_location
from tasks.models.reload_check import BOUND, ReloadCheck, compare, fixed_logprobs

ADAPTER = "adapter"
BASE = "base"
ATTENTION = "eager"
NUM_TEXTS = 8
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "vocab.json")


def fixed_texts(store: Store, artifact: Artifact) -> list[str]:
    """A few questions with their solutions, from what the model was trained on."""
    parent = artifact.manifest.parents["questions"]
    table = store.get(parent.stage, parent.key).table("questions").slice(0, NUM_TEXTS)
    return [
        f"{row['question']}\n{row['reference_solution'] or row['gold']}"
        for row in table.to_pylist()
    ]


def start_model(store: Store, artifact: Artifact) -> Artifact:
    """The artifact whose model was trained. UserError when it is gone."""
    parent = artifact.manifest.parents["model"]
    return store.get(parent.stage, parent.key)


def with_adapter(store: Store, artifact: Artifact, adapter: Path, dtype: str) -> Any:
    """The model that was trained with the adapter in `adapter` on it, unmerged."""
    from peft import PeftModel

    start = load_model(start_model(store, artifact), dtype=dtype, attention=ATTENTION)
    return PeftModel.from_pretrained(start, adapter)


def logprobs_of(folder: Path, dtype: str, texts: list[str]) -> list[float]:
    """Log-probabilities of the texts under the checkpoint in `folder`, its own tokenizer's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, use_safetensors=True
    )
    return fixed_logprobs(model, AutoTokenizer.from_pretrained(folder), texts)


def export_whole(store: Store, artifact: Artifact, folder: Path, dtype: str) -> ReloadCheck:
    """Write the merged checkpoint; compare with base and adapter, or with the checkpoint."""
    shutil.copytree(artifact.path(CHECKPOINT), folder, dirs_exist_ok=True)
    texts, tokenizer = fixed_texts(store, artifact), load_tokenizer(artifact)
    if (artifact.folder / ADAPTER).is_dir():
        trained = with_adapter(store, artifact, artifact.path(ADAPTER), "float32")
    else:
        trained = load_model(artifact, dtype=dtype, attention=ATTENTION)
    return compare(fixed_logprobs(trained, tokenizer, texts), logprobs_of(folder, dtype, texts))


def export_adapter(
    store: Store, artifact: Artifact, folder: Path, dtype: str
) -> tuple[ReloadCheck, str]:
    """Write the adapter, and its base model unless that is on the hub; compare with the merged
    checkpoint. Also returns where the base model is."""
    shutil.copytree(artifact.path(ADAPTER), folder, dirs_exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in artifact.path(CHECKPOINT).glob(pattern):
            shutil.copy2(file, folder)
    start = model_location(start_model(store, artifact))
    base = start.path
    if Path(start.path).is_dir():
        base = BASE
        shutil.copytree(start.path, folder / BASE, copy_function=shutil.copyfile)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"base_model_name_or_path": base, "revision": start.revision}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    texts, tokenizer = fixed_texts(store, artifact), load_tokenizer(artifact)
    exported = fixed_logprobs(with_adapter(store, artifact, folder, "float32"), tokenizer, texts)
    return compare(logprobs_of(artifact.path(CHECKPOINT), dtype, texts), exported), base


def export(store: Store, ref: str, to: Path, *, adapter: bool) -> ReloadCheck:
    """Write the model of artifact `ref` ('stage/key') to the new folder `to`.

    UserError for a damaged artifact, a folder in use or an adapter that isn't there; RuntimeError
    when the export isn't the trained model.
    """
    stage, _, key = ref.partition("/")
    artifact = store.get(stage, key)
    if (damage := store.damage(artifact)) is not None:
        raise UserError(f"{ref} is damaged ({damage}): run the pipeline again, it is made anew")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} is in use: name a new or empty folder")
    if adapter and not (artifact.folder / ADAPTER).is_dir():
        raise UserError(f"{ref} has no adapter, all its weights were trained: leave out --adapter")
    dtype = artifact.manifest.config["model"]["dtype"]
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f".{to.name}.{secrets.token_hex(4)}")
    try:
        unfinished.mkdir()
        base = None
        if adapter:
            check, base = export_adapter(store, artifact, unfinished, dtype)
        else:
            check = export_whole(store, artifact, unfinished, dtype)
        if not check.mean_difference <= BOUND[dtype]:
            raise RuntimeError(
                f"the export is not the trained model: log-probabilities differ by "
                f"{check.mean_difference:.2e} nats per token on average (at most "
                f"{BOUND[dtype]:.0e} may pass in {dtype})"
            )
        comparison = comparison_of(store, artifact)
        card = model_card(
            to.name,
            ancestry(store, stage, key),
            None if comparison is None else comparison.manifest,
            base=base,
            check=vars(check),
        )
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        if to.exists():
            to.rmdir()
        unfinished.rename(to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return check
