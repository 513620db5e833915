"""Stage 'model': find the model, fetch or convert it where needed, check that it can be used.

The artifact holds `model.json`: where the model came from (`source`), where it lies now (`path`:
a hub id with the commit in `revision`, an absolute folder, or `checkpoint` for one converted into
the artifact) and what later stages ask about it. Local models are pointed at, not copied: their
contents are in the stage's key. Loads no weights but to convert.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ratchet.config.run import ModelConfig
from ratchet.errors import UserError
from ratchet.models.check import (
    SMOLLM2,
    Kind,
    check_model,
    check_model_dir,
    context_length,
    has_chat_template,
    kind_of,
    local_folder,
    num_parameters,
    packaged_model_dir,
    read_config,
    smollm2_gguf,
    text_config,
)
from tasks.models.checkpoints import CHECKPOINT, MODEL_FILE
from tasks.runtime.context import StageContext, StageResult

WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]


def run(ctx: StageContext, *, model: ModelConfig) -> StageResult:
    """Write `model.json`. UserError when the model is missing, incomplete or out of reach."""
    check_model(model)
    folder, path, revision = _bring(ctx, model)
    check_model_dir(folder)
    config = read_config(folder)
    facts: dict[str, Any] = {
        "source": model.path,
        "path": path,
        "revision": revision,
        "context": _limit(model, context_length(config)),
        "vocab_size": text_config(config)["vocab_size"],
        "has_chat_template": has_chat_template(folder),
        "num_parameters": num_parameters(folder),
    }
    (ctx.out_dir / MODEL_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if not facts["has_chat_template"]:
        ctx.log("the tokenizer has no chat template: prompts are plain text")
    return StageResult(
        summary={"model_type": config["model_type"], **facts}, markdown=_markdown(model, facts)
    )


def _bring(ctx: StageContext, model: ModelConfig) -> tuple[Path, str, str | None]:
    """Get hold of the model's files: (folder they lie in, path and revision for `model.json`)."""
    kind = kind_of(model.path)
    if kind is Kind.HUB:
        folder = fetch(model.path, model.revision, ctx)
        # A hub snapshot lies in a folder named by its commit.
        return folder, model.path, folder.name
    if model.path == SMOLLM2:
        from tasks.models.smollm2 import convert

        ctx.log("converting the GGUF file of SmolLM2 to safetensors")
        convert(smollm2_gguf(), ctx.out_dir / CHECKPOINT)
        return ctx.out_dir / CHECKPOINT, CHECKPOINT, None
    folder = packaged_model_dir(model.path) if kind is Kind.PACKAGED else local_folder(model.path)
    return folder, str(folder), None


def fetch(hub_id: str, revision: str | None, ctx: StageContext) -> Path:
    """The model's snapshot in the hub's local cache, downloaded if it isn't there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    ctx.log(f"fetching {hub_id} from the hub, unless it is in the local cache")
    where = f"model.path: '{hub_id}'"
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=WANTED_FILES))
    except GatedRepoError:
        raise UserError(
            f"{where} asks for a licence to be accepted: do so on its page, then log in "
            "with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"{where} is neither a local folder nor a model on the hub") from None
    except RevisionNotFoundError:
        raise UserError(f"{where} has no revision '{revision}' (model.revision)") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{where} is no local folder, and the hub can't be reached ({reason}): give a local "
            "folder or fetch the model where there is a network"
        ) from None


def _limit(model: ModelConfig, own: int | None) -> int:
    """The context to work with. UserError when the configuration asks for more than there is."""
    if own is None and model.max_model_len is None:
        raise UserError("the model's config.json names no context length: set model.max_model_len")
    if own is not None and model.max_model_len is not None and model.max_model_len > own:
        raise UserError(f"model.max_model_len = {model.max_model_len} exceeds the model's {own}")
    found = model.max_model_len or own
    assert found is not None
    return found


def _markdown(model: ModelConfig, facts: dict[str, Any]) -> str:
    revision = f" at `{facts['revision']}`" if facts["revision"] else ""
    return (
        f"**{facts['source']}**{revision}: {facts['num_parameters'] / 1e6:,.1f} M parameters, "
        f"vocabulary {facts['vocab_size']:,}, context {facts['context']:,} tokens, "
        f"{'a' if facts['has_chat_template'] else 'no'} chat template; used in {model.dtype}."
    )
