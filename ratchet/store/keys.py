"""Keys: the hash of everything a stage's result depends on.

A key covers the stage, its configuration sections, fingerprints of what those sections point at
outside the store (files, prompt texts), the keys of its inputs, the version of its code and the
run's seed. Keys of a whole run follow from its configuration alone, before anything has run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY_LENGTH = 20


def canonical_json(value: Any) -> str:
    """JSON that is the same for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def text_hash(text: str) -> str:
    """sha256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artifact_key(
    stage: str,
    config: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    inputs: Mapping[str, str],
    code: str,
    seed: int,
) -> str:
    """The key of an artifact; `inputs` maps role to input key."""
    parts = {
        "stage": stage,
        "config": dict(config),
        "fingerprints": dict(fingerprints),
        "inputs": dict(inputs),
        "code": code,
        "seed": seed,
    }
    return text_hash(canonical_json(parts))[:KEY_LENGTH]
