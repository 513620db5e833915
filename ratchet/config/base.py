"""What every section of the configuration is, and how its settings are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration; unknown fields and infinite numbers are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested plain configuration, each with its path as `--set` takes it."""
    if isinstance(value, dict) and value:
        inside = list(value.items())
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        inside = list(enumerate(value))
    else:
        yield path, value
        return
    for name, inner in inside:
        yield from leaves(inner, f"{path}.{name}" if path else str(name))
