"""What a GRPO run is checked for before a model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.errors import UserError
from ratchet.resources.device import Device
from ratchet.store.manifest import ParentRecord
from tasks.grpo import checks
from tasks.grpo.checks import check_length, tell_dropped_defaults
from tasks.grpo.settings import Sections
from tasks.runtime.context import StageContext
from tests.support.made_up import artifact
from tests.support.tiny_grpo import SEEDLING, context, run_stage

HEADROOM = {"truncated_share": 0.62, "length_quantiles": {"0.5": 40}}


def selected(
    folder: Path, found: dict[str, Any], model_key: str | None = None
) -> tuple[StageContext, list[str]]:
    """A context whose questions were chosen with this headroom, from completions of the model with
    this key; and what is logged."""
    said: list[str] = []
    ctx = replace(context(folder, SEEDLING), emit=lambda event: said.append(event["message"]))
    chain: dict[str, ParentRecord] = {}
    key = model_key or "f" * 20
    for stage, role in (("presample", "model"), ("score", "completions"), ("filter", "scores")):
        parents = chain or {role: ParentRecord(stage="warmstart_sft", key=key, content="")}
        made = artifact(
            ctx.store.folder(stage, "a" * 20),
            stage,
            {},
            key="a" * 20,
            parents=parents,
            summary={"headroom": found},
        )
        (made.folder / "manifest.json").write_text(made.manifest.model_dump_json())
        chain = {{"presample": "completions", "score": "scores"}.get(stage, ""): made.as_parent()}
    return replace(ctx, inputs={**ctx.inputs, "selection": made}), said


def test_a_limit_below_the_median_is_refused_for_the_model_that_wrote(tmp_path: Path) -> None:
    own = context(tmp_path / "x", SEEDLING).inputs["model"].manifest.key
    ctx, said = selected(tmp_path / "a", HEADROOM, own)
    with pytest.raises(UserError) as caught:
        check_length(ctx, SamplerConfig(max_completion_tokens=64))
    words = "62% of the completions that questions were chosen by were cut off, so most are longer"
    assert str(caught.value).startswith(
        f"{words} than sampler.max_completion_tokens = 64: raise it"
    )
    short = {"truncated_share": 0.1, "length_quantiles": {"0.5": 90}}
    ctx, said = selected(tmp_path / "b", short, own)
    with pytest.raises(UserError, match=r"median of 90 tokens, .*max_completion_tokens = 64: rai"):
        check_length(ctx, SamplerConfig(max_completion_tokens=64))
    check_length(ctx, SamplerConfig(max_completion_tokens=90))
    unknown = {"truncated_share": None, "length_quantiles": {}}  # of a log that doesn't say
    check_length(selected(tmp_path / "c", unknown, own)[0], SamplerConfig(max_completion_tokens=64))
    assert said == []


def test_another_models_lengths_are_a_warning(tmp_path: Path) -> None:
    ctx, said = selected(tmp_path, HEADROOM)  # presampled before the warm-start
    check_length(ctx, SamplerConfig(max_completion_tokens=64))
    assert len(said) == 1
    assert said[0].startswith(
        "warning: 62% of the completions that questions were chosen by were cut off"
    )
    assert said[0].endswith("unless the warm-start has made them shorter")


def test_the_models_sampling_defaults_are_dropped_and_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in SEEDLING.iterdir():
        if file.is_file() and file.name != "generation_config.json":
            (model / file.name).symlink_to(file)
    own = {"top_k": 20, "top_p": 0.95, "temperature": 0.6, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(own))
    said: list[str] = []
    ctx = replace(context(tmp_path, model), emit=lambda event: said.append(event["message"]))
    tell_dropped_defaults(ctx)
    (line,) = said
    for part in ("top_k = 20", "top_p = 0.95", "temperature = 0.6", "dropped, RL samples from"):
        assert part in line
    said.clear()
    tell_dropped_defaults(replace(context(tmp_path / "b", SEEDLING), emit=ctx.emit))
    assert said == []


def test_a_run_that_cannot_fit_is_refused_and_a_doubtful_one_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_free(free: float) -> None:
        memory = Device("this machine's memory", False, 10**10, int(free))
        monkeypatch.setattr(checks, "find_device", lambda: memory)

    with_free(0.8e9)
    with pytest.raises(UserError, match=r"grpo needs 0\.9 GB to .* has 0\.8 GB: surely too big"):
        run_stage(context(tmp_path, SEEDLING), lora=LoraConfig(enabled=False))
    assert not (tmp_path / "work" / "training").exists()  # no trainer was made
    said: list[str] = []
    ctx = replace(context(tmp_path, SEEDLING), emit=lambda event: said.append(event["message"]))
    from tasks.stages.grpo import prepare

    sections = tiny_sections()
    longest = prepare(ctx, sections)[1].longest
    with_free(1.5e9)
    checks.check_memory(ctx, sections, longest)
    assert said[-1].startswith("warning: grpo needs 1.2 GB to 2.0 GB")
    assert "may be too big" in said[-1]
    assert "grpo.micro_batch_size = " in said[-1]
    with_free(9e9)
    checks.check_memory(ctx, sections, longest)
    assert said[-1].startswith("memory: 1.2 to 2.0 GB")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Device("a GPU", True, 1, 1)
    monkeypatch.setattr(checks, "visible_gpus", lambda: [one])
    with pytest.raises(UserError, match=r"grpo\.processes = 2 needs as many GPUs, and 1 can be"):
        checks.check_devices(GrpoConfig(processes=2))
    monkeypatch.setattr(checks, "visible_gpus", lambda: [one, one])
    checks.check_devices(GrpoConfig(processes=2))
    monkeypatch.setattr(checks, "visible_gpus", list)
    checks.check_devices(GrpoConfig(processes=2))  # processes share a CPU


def tiny_sections() -> Sections:
    """The stage's sections, large enough for activations to matter."""
    return Sections(
        ModelConfig(),
        PromptConfig(format=PromptFormat.TAGS_SHORT),
        SamplerConfig(engine="transformers", max_completion_tokens=256),
        RewardsConfig(),
        GrpoConfig(micro_batch_size=64),
        GuardConfig(),
        WandbConfig(),
    )
