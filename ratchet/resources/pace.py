"""How long training and presampling will take, from what earlier runs of this store took."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.run import RunConfig
from ratchet.store.manifest import Manifest
from ratchet.store.store import Store
from ratchet.words import duration

SAME = (("model", "path"), ("model", "dtype"), ("sampler", "engine"))
"""Settings that an earlier stage must share for its pace to say anything."""
CREW = {"presample": ("workers", "count"), "grpo": ("grpo", "processes")}
"""By stage, the setting that says how many work at once: it must be the same too."""


def _earlier(store: Store, stage: str, config: RunConfig) -> Manifest | None:
    """The newest artifact of a stage that was made with this model in this way by as many."""
    own = config.model_dump(mode="json")
    found = [
        artifact.manifest
        for artifact in store.artifacts()
        if artifact.manifest.stage == stage
        and all(
            artifact.manifest.config.get(section, {}).get(name) == own[section][name]
            for section, name in (*SAME, CREW[stage])
        )
    ]
    return max(found, key=lambda manifest: manifest.started_at, default=None)


def _unknown(config: RunConfig, stage: str) -> str:
    section, name = CREW[stage]
    count = getattr(getattr(config, section), name)
    crew = "" if count == 1 else f" and {section}.{name} = {count}"
    return f"{stage}: unknown, no earlier one with this model{crew} here"


def _presample(config: RunConfig, before: Manifest | None, num_questions: int | None) -> str:
    if before is None or not before.summary.get("tokens_per_second"):
        return _unknown(config, "presample")
    if num_questions is None:
        return "presample: unknown until the questions are loaded and counted"
    facts, k = before.summary, config.presample.k
    tokens = facts["num_tokens"] / facts["num_completions"]
    rate = facts["tokens_per_second"]
    seconds = num_questions * k * tokens / rate
    return (
        f"presample: about {duration(seconds, rough=True)} ({num_questions:,} questions × {k} × "
        f"{tokens:.0f} tokens at {rate:,.0f} tokens/s, measured on {before.device})"
    )


def _grpo(config: RunConfig, before: Manifest | None) -> str:
    if before is None:
        return _unknown(config, "grpo")
    facts, old = before.summary, before.config["grpo"]
    completions = facts["num_steps"] * old["prompts_per_step"] * old["group_size"]
    each = facts["train_seconds"] / completions
    steps, batch = config.grpo.steps, config.grpo.prompts_per_step * config.grpo.group_size
    return (
        f"grpo: about {duration(steps * batch * each, rough=True)} ({steps} steps of "
        f"{batch * each:.1f} s, {facts['sampled_tokens'] / facts['train_seconds']:,.0f} tokens/s "
        f"through the whole step, measured on {before.device})"
    )


def pace(
    config: RunConfig, store: Store, running: set[str], num_questions: int | None
) -> Iterator[str]:
    """A line for each stage among `running` whose time can be worked out or is unknown;
    `num_questions` are there to presample, None where that isn't known yet."""
    if "presample" in running:
        yield _presample(config, _earlier(store, "presample", config), num_questions)
    if "grpo" in running:
        yield _grpo(config, _earlier(store, "grpo", config))
