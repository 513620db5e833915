"""P0: what can be seen of the two sides before a weight is moved or a token sampled.

Each check compares what the engine says of itself with what the trainer really is, not with the
configuration that both were made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tasks.audit.diagnosis import Cause, Finding, Probe
from tasks.audit.reference import Reference, checkpoint_name
from tasks.audit.rows import Report, fact, named
from tasks.sync.adapter import ADAPTER
from tasks.sync.types import EngineFacts

NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Values of a request's parameters that leave the model's distribution as it is."""


class _Checks(Report):
    def check(self, name: str, ok: bool, seen: str, cause: Cause, words: str) -> None:
        self.rows.append(fact(Probe.CONFIGURATION, name, ok, seen))
        if not ok:
            self.findings.append(Finding(Probe.CONFIGURATION, cause, words))


def check_configuration(
    facts: EngineFacts, reference: Reference, dtype: str, mixed_precision: str, *, by_adapter: bool
) -> Report:
    """Everything but the sampling parameters.

    `dtype` is the run's, `mixed_precision` Accelerate's ('no' or 'bf16'): full fine-tuning in
    bfloat16 computes in bfloat16 from float32 weights. `by_adapter` says how weights are synced.
    """
    found = _Checks()
    trainer = _trainer_dtype(reference, mixed_precision)
    found.check(
        "number format",
        facts.dtype == trainer == dtype and facts.kv_cache_dtype in ("auto", facts.dtype),
        f"{facts.dtype}, cache {facts.kv_cache_dtype}",
        Cause.NUMBER_FORMAT,
        f"the engine computes in {facts.dtype} (its cache: {facts.kv_cache_dtype}), the trainer in "
        f"{trainer}, the run is set to {dtype}",
    )
    found.check(
        "quantisation",
        facts.quantization is None,
        facts.quantization or "none",
        Cause.QUANTISED,
        f"the engine's weights are quantised ({facts.quantization})",
    )
    found.check(
        "log-prob mode",
        facts.logprobs_mode == "processed_logprobs",
        facts.logprobs_mode,
        Cause.LOGPROBS_MODE,
        f"the engine reports {facts.logprobs_mode}, which aren't those of the distribution that it "
        "samples from",
    )
    dropping = dropouts(reference.model)
    found.check(
        "dropout",
        not dropping,
        named(dropping) or "none",
        Cause.DROPOUT,
        f"the trainer drops activations in train mode ({named(dropping)}) and the sampler never "
        "does",
    )
    rows = int(reference.model.get_output_embeddings().weight.shape[0])
    found.check(
        "vocabulary rows",
        rows == facts.vocab_rows,
        f"{facts.vocab_rows:,}",
        Cause.VOCABULARY,
        f"the trainer's softmax runs over {rows:,} tokens, the engine's over {facts.vocab_rows:,}",
    )
    if by_adapter:
        _check_rank(found, facts, reference)
    return found


def _check_rank(found: _Checks, facts: EngineFacts, reference: Reference) -> None:
    rank = max(layer.r[ADAPTER] for layer in reference.layers.values())
    room = facts.lora_rank or 0
    found.check(
        "adapter rank",
        rank <= room,
        f"{rank} of {room}",
        Cause.RANK,
        f"the adapter has rank {rank}, the engine takes up to {room}",
    )


def check_sampling(sampling: Mapping[str, float | int] | None, temperature: float) -> Report:
    """The parameters of a sampling request, as far as the sampler tells them."""
    found = _Checks()
    if sampling is None:
        return found
    wanted = NEUTRAL | {"temperature": (temperature,)}
    off = {name: sampling[name] for name in wanted if sampling[name] not in wanted[name]}
    seen = ", ".join(f"{name} = {value}" for name, value in off.items())
    found.check(
        "sampling parameters",
        not off,
        seen or f"temperature {temperature:g}, nothing else",
        Cause.SAMPLING,
        f"requests carry {seen}: the log-probabilities are not those of the model",
    )
    return found


def dropouts(model: nn.Module) -> list[str]:
    """Modules that drop activations while the model is in train mode."""
    found = []
    for name, module in model.named_modules():
        own = isinstance(module, nn.Dropout) and module.p > 0
        # Attention modules hand this number to their kernel in train mode.
        rate = module.__dict__.get("attention_dropout", 0.0)
        if own or (isinstance(rate, float) and rate > 0):
            found.append(checkpoint_name(name))
    return found


def _trainer_dtype(reference: Reference, mixed_precision: str) -> str:
    """The number format that the trainer computes in."""
    layers: dict[str, Any] = reference.layers
    name = next(iter(layers), None) or next(iter(reference.base))
    held = str(reference.base[name].dtype).removeprefix("torch.")
    return "bfloat16" if held == "float32" and mixed_precision == "bf16" else held
