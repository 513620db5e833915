"""The ways of decoding that the benchmark compares: greedy, and as the model itself proposes.

Makers of a model say in its `generation_config.json` how it is to be sampled. Taken are the five
settings that vLLM takes from that file by itself; others have no effect there either.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ratchet.errors import UserError
from ratchet.store.store import Artifact
from tasks.models.checkpoints import model_location
from tasks.sampling.engines import PLAIN, Shaping

SHAPING = tuple(asdict(PLAIN))


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen."""

    name: str
    """'greedy' or 'model'."""
    temperature: float
    """0 is greedy."""
    shaping: Shaping

    def columns(self) -> dict[str, Any]:
        """Name and settings, for a table."""
        return {"decoding": self.name, "temperature": self.temperature, **asdict(self.shaping)}


GREEDY = Decoding("greedy", 0.0, PLAIN)


def own_decoding(model: Artifact) -> Decoding:
    """As the model's generation config says. UserError when it says nothing of sampling, or that
    it isn't to be sampled."""
    from transformers import GenerationConfig

    where = model_location(model)
    try:
        config = GenerationConfig.from_pretrained(where.path, revision=where.revision)
        said = config.to_diff_dict()
    except OSError:  # it has none
        said = {}
    given = {name: said[name] for name in ("temperature", *SHAPING) if said.get(name) is not None}
    temperature = given.pop("temperature", 1.0)
    samples = said.get("do_sample", bool(given) or temperature != 1.0)
    if not samples or temperature == 0:
        raise UserError(
            "benchmark.decoding = 'model' needs a model that says how it is to be sampled, and the "
            "generation_config.json of this one names no temperature, top_p, top_k or min_p: leave "
            "'greedy'"
        )
    return Decoding("model", float(temperature), Shaping(**given))
