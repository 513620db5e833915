"""The section of the configuration that says who does the sampling; it changes no result."""

from __future__ import annotations

from pydantic import Field

from ratchet.config.base import Section


class WorkersConfig(Section):
    """Who makes the shards of presampling, benchmark and evaluation; changes no result."""

    count: int = Field(default=1, ge=1)
    """Engines at work at once, each with a GPU of its own where there are GPUs."""
    ray: str | None = Field(default=None, min_length=1)
    """'auto' or an address: let a Ray cluster do it (it sees the store under the same path);
    'local': Ray on this machine alone."""
