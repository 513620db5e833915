"""What every section of the configuration is, and how settings are written as lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration; unknown fields and infinite numbers are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def setting_lines(value: Any, path: str = "") -> Iterator[str]:
    """'section.field = value' lines of a nested configuration, by the paths that `--set` takes."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from setting_lines(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from setting_lines(inner, f"{path}.{index}")
    else:
        yield f"{path} = {json.dumps(value, ensure_ascii=False)}"
