"""What a GRPO run is checked for before a model is loaded: memory, the length of completions, and
what the model's own sampling defaults would have done."""

from __future__ import annotations

from typing import Any

from ratchet.config.run import GrpoConfig, SamplerConfig
from ratchet.errors import UserError
from ratchet.models.shape import model_folder, shape_of
from ratchet.resources.device import find_device, visible_gpus
from ratchet.resources.memory import Sampling
from ratchet.resources.memory_check import Fit, Wanted, judge, vllm_shortage
from ratchet.store.store import Artifact
from tasks.grpo.settings import Sections
from tasks.models.checkpoints import model_location
from tasks.runtime.context import StageContext

MANY_CUT = 0.5
"""With this share of the completions cut off, the median length is not below the limit."""


def check_before_loading(ctx: StageContext, sections: Sections, longest_prompt: int) -> None:
    """UserError when the run can't fit or can't learn; warnings where it may not."""
    check_devices(sections.grpo)
    check_length(ctx, sections.sampler)
    tell_dropped_defaults(ctx)
    check_memory(ctx, sections, longest_prompt)


def check_devices(grpo: GrpoConfig) -> None:
    """UserError when several processes are to share fewer GPUs."""
    gpus = visible_gpus()
    if gpus and grpo.processes > len(gpus):
        raise UserError(
            f"grpo.processes = {grpo.processes} needs as many GPUs, and {len(gpus)} can be seen: "
            "lower it, or widen CUDA_VISIBLE_DEVICES"
        )


def check_memory(ctx: StageContext, sections: Sections, longest_prompt: int) -> None:
    """UserError when the device surely has too little free memory, a warning when it may."""
    where = model_location(ctx.inputs["model"])
    folder = model_folder(where.path, where.revision)
    shape = None if folder is None else shape_of(folder)
    device = find_device()
    if shape is None or device is None:
        ctx.log("memory: not estimated, the model or the device doesn't say its size")
        return
    sampler = sections.sampler
    wanted = Wanted(
        name="grpo",
        section=sections.grpo,
        dtype=sections.model.dtype,
        longest=sampler.max_completion_tokens,
        prompt_tokens=longest_prompt,
        sampling=Sampling(sampler.engine, sampler.max_num_seqs),
        shape=shape,
        device=device,
    )
    if (shortage := vllm_shortage(wanted)) is not None:
        raise UserError(shortage)
    found = judge(wanted, device.free)
    if found.fit is Fit.NO:
        raise UserError(found.words())
    if found.fit is Fit.PERHAPS:
        ctx.log(f"warning: {found.words()}")
    else:
        ctx.log(
            f"memory: {found.low.total / 1e9:.1f} to {found.high.total / 1e9:.1f} GB, "
            f"{device.free / 1e9:.1f} GB are free"
        )


def _sampled_model(ctx: StageContext, selection: Artifact) -> tuple[str, str] | None:
    """Stage and key of the model whose completions the questions were selected by; None where the
    store doesn't know."""
    current = selection
    for role in ("scores", "completions"):
        parent = current.manifest.parents.get(role)
        found = None if parent is None else ctx.store.find(parent.stage, parent.key)
        if found is None:
            return None
        current = found
    model = current.manifest.parents.get("model")
    return None if model is None else (model.stage, model.key)


def check_length(ctx: StageContext, sampler: SamplerConfig) -> None:
    """UserError when at least half of this very model's presampled completions do not fit into
    `max_completion_tokens`; a warning where another model (before the warm-start) wrote them."""
    selection = ctx.inputs["selection"]
    found: dict[str, Any] | None = selection.manifest.summary.get("headroom")
    if found is None:  # chosen without completions
        return
    limit, cut = sampler.max_completion_tokens, found["truncated_share"]
    median = found["length_quantiles"].get("0.5")
    if cut is not None and cut >= MANY_CUT:
        what = f"{cut:.0%} of the completions that questions were chosen by were cut off"
    elif median is not None and median > limit:
        what = f"the completions that questions were chosen by have a median of {median} tokens"
    else:
        return
    words = (
        f"{what}, so most are longer than sampler.max_completion_tokens = {limit}: raise it"
        " (a completion that is cut off gets no answer, and groups of them no gradient)"
    )
    model = ctx.inputs["model"].manifest
    if _sampled_model(ctx, selection) == (model.stage, model.key):
        raise UserError(words)
    ctx.log(f"warning: {words}, unless the warm-start has made them shorter")


NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0, "repetition_penalty": 1.0}


def tell_dropped_defaults(ctx: StageContext) -> None:
    """Say which sampling defaults of the model are not used: truncation would bias the ratio."""
    from transformers import GenerationConfig

    where = model_location(ctx.inputs["model"])
    try:
        config = GenerationConfig.from_pretrained(where.path, revision=where.revision)
    except OSError:  # it has none
        return
    own = {name: value for name, value in config.to_diff_dict().items() if name in NEUTRAL}
    dropped = {name: value for name, value in own.items() if value != NEUTRAL[name]}
    if dropped:
        named = ", ".join(f"{name} = {value:g}" for name, value in dropped.items())
        ctx.log(f"the model's generation config has {named}: dropped, RL samples from the policy")
