"""Whether a training stage fits on its device, and which setting would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ratchet.config.run import Dtype, GrpoConfig, LoraConfig, OpdConfig, SftConfig
from ratchet.models.shape import ModelShape
from ratchet.resources.device import Device
from ratchet.resources.memory import (
    GB,
    NUMBER_BYTES,
    SHORT,
    Estimate,
    Sampling,
    grpo_parts,
    opd_parts,
    sft_parts,
    training,
)

MIN_COMPLETION = 64
"""No shorter completions are advised."""
MIN_SHARE = 0.05
NUM_LARGEST = 3
"""Parts that are named where it doesn't fit."""


class Fit(StrEnum):
    """Whether a stage fits."""

    SURELY = "fits"
    PERHAPS = "may be too big"
    NO = "surely too big"


@dataclass(frozen=True)
class Wanted:
    """A training stage as it is set."""

    name: str
    """Its section: 'grpo', 'sft' or 'opd'."""
    section: GrpoConfig | SftConfig | OpdConfig
    dtype: Dtype
    longest: int
    """Tokens of the longest completion; of the longest example, prompt included, for SFT."""
    prompt_tokens: int
    sampling: Sampling
    shape: ModelShape
    device: Device
    teacher: ModelShape | None = None
    dev_tokens: int = 0
    """For a warm-start: tokens of the longest answer to a dev question; 0 where there are none."""

    def estimate(self, divisor: int = 1) -> Estimate:
        """What it holds when prompts and completions are the longest divided by `divisor`."""
        prompt = self.prompt_tokens // divisor
        on = training(self.section, self.shape, self.dtype, prompt, self.device)
        length = max(1, self.longest // divisor)
        section, sampling = self.section, self.sampling
        if isinstance(section, GrpoConfig):
            return Estimate(grpo_parts(on, section, sampling, length))
        num_dev = min(sampling.max_num_seqs, section.dev_questions) if self.dev_tokens else 0
        if isinstance(section, SftConfig):
            return Estimate(sft_parts(on, length, num_dev, self.dev_tokens // divisor))
        return Estimate(opd_parts(on, section, sampling, self.teacher, length, num_dev))

    def with_field(self, **values: object) -> Wanted:
        """The same with other fields of its section."""
        return replace(self, section=self.section.model_copy(update=values))


@dataclass(frozen=True)
class Verdict:
    """Whether it fits into `capacity` bytes."""

    wanted: Wanted
    low: Estimate
    high: Estimate
    capacity: int
    fit: Fit
    advice: tuple[str, ...]
    """Single settings that would make it fit, each with what is needed then."""

    def words(self) -> str:
        """The verdict in one line, with what takes most and what to do."""
        largest = sorted(self.high.parts, key=lambda part: -part.num_bytes)[:NUM_LARGEST]
        what = "; ".join(f"{part.what} {_gb(part.num_bytes)} ({part.why})" for part in largest)
        todo = " or ".join(self.advice) or (
            "no single setting makes it fit: take a smaller model, or change several "
            f"({self.wanted.name}.micro_batch_size, lora, model.dtype, the completions' length)"
        )
        return (
            f"{self.wanted.name} needs {_gb(self.low.total)} to {_gb(self.high.total)} and "
            f"{self.wanted.device.name} has {_gb(self.capacity)}: {self.fit}. Largest: {what}. "
            f"What fits: {todo}"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.1f} GB"


def judge(wanted: Wanted, capacity: int) -> Verdict:
    """Hold what a stage needs against `capacity` bytes."""
    low, high = wanted.estimate(SHORT), wanted.estimate()
    fit = Fit.SURELY if high.total <= capacity else Fit.PERHAPS
    if low.total > capacity:
        fit = Fit.NO
    advice: dict[str, str] = {}
    if fit is not Fit.SURELY:
        for setting, value, other in _alternatives(wanted):
            total = other.estimate().total
            if setting not in advice and total <= capacity:
                advice[setting] = f"{setting} = {value} ({_gb(total)})"
    return Verdict(wanted, low, high, capacity, fit, tuple(advice.values()))


def vllm_shortage(wanted: Wanted) -> str | None:
    """What is wrong when vLLM's share of a GPU can't hold the model and one sequence."""
    section, shape = wanted.section, wanted.shape
    if isinstance(section, SftConfig) or wanted.sampling.engine != "vllm":
        return None
    number = NUMBER_BYTES[wanted.dtype]
    sequence = (wanted.prompt_tokens + wanted.longest) * shape.kv_token_bytes(number)
    need = shape.num_parameters * number + sequence
    share = section.vllm_memory_utilization
    if not wanted.device.is_gpu or need <= share * wanted.device.total:
        return None
    return (
        f"{wanted.name}.vllm_memory_utilization = {share:g} gives vLLM "
        f"{_gb(int(share * wanted.device.total))}, and weights and one sequence take {_gb(need)}: "
        f"raise it to at least {need / wanted.device.total:.2f}"
    )


def _alternatives(wanted: Wanted) -> Iterator[tuple[str, str, Wanted]]:
    """Setting, value and the stage with that one setting changed; of a setting the least change
    first."""
    name, section = wanted.name, wanted.section
    size = section.micro_batch_size
    while size % 2 == 0:
        size //= 2
        yield f"{name}.micro_batch_size", str(size), wanted.with_field(micro_batch_size=size)
    if not section.lora.enabled:
        lora = LoraConfig(enabled=True, r=section.lora.r, alpha=section.lora.alpha)
        yield f"{name}.lora.enabled", "true", wanted.with_field(lora=lora)
    if wanted.dtype == "float32":
        yield "model.dtype", "bfloat16", replace(wanted, dtype="bfloat16")
    longest = "sft.max_length" if name == "sft" else "sampler.max_completion_tokens"
    length = wanted.longest // 2
    while length >= MIN_COMPLETION:
        yield longest, str(length), replace(wanted, longest=length)
        length //= 2
    if not isinstance(section, SftConfig) and wanted.device.is_gpu:
        share = section.vllm_memory_utilization
        while wanted.sampling.engine == "vllm" and share > MIN_SHARE:
            share = round(share - MIN_SHARE, 2)
            other = wanted.with_field(vllm_memory_utilization=share)
            if vllm_shortage(other) is None:
                yield f"{name}.vllm_memory_utilization", f"{share:g}", other
    if isinstance(section, GrpoConfig) and section.processes > 1 and not wanted.device.is_gpu:
        yield "grpo.processes", "1", wanted.with_field(processes=1)
