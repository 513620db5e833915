"""How much memory a training stage takes, worked out before anything is loaded.

What is certain (weights, gradients, AdamW's two moments, the sampler's share) is counted exactly;
what depends on lengths is bounded twice: at the longest prompt and completion that are allowed,
and at a quarter of both. A stage that is too big by the lower bound is refused, one that may be too
big by the upper one is warned about.

TRL 1.16 never holds whole logits: log-probabilities are computed in tiles of at most 4,096 tokens
by 32,768 vocabulary rows. Activations follow a rule: per token and layer, 8 numbers per unit of
the hidden size, 5 per unit of the queries' width, 4 of the keys', 4 of the MLP's. It is what the
modules of Llama and Qwen keep for the backward pass, counted; with gradient checkpointing (on GPUs)
each layer keeps its input and one layer at a time the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ratchet.config.run import Dtype, GrpoConfig, LoraConfig, OpdConfig, SftConfig
from ratchet.models.shape import ModelShape
from ratchet.resources.device import Device

GB = 1e9
GIB = 2**30
NUMBER_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
ADAM_BYTES = 8
"""Per trained parameter: two moments in float32."""
TILE_TOKENS, TILE_ROWS = 4096, 32768
TORCH_COPIES = 7.25
"""Float32 copies of a tile that its backward pass holds without Triton, which is on GPUs only."""
LOGIT_COPIES = 5
"""Whole copies of the logits that a loss holds which does not work in tiles."""
SHORT = 4
"""The lower bound takes the longest prompt and completion divided by this."""
PROCESS_BYTES = {True: int(0.8e9), False: int(0.9e9)}
"""What a process takes before it holds a model, on a GPU (True: device context) and on a CPU
(libraries)."""
CPU_CACHE_SHARE = 8
"""vLLM's cache on a CPU is at most this fraction of the memory, and one GiB at least."""


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    what: str
    num_bytes: int
    why: str


@dataclass(frozen=True)
class Estimate:
    """What a stage holds at once, for completions of one length."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class Training:
    """What the estimate knows of one training process, whichever stage it belongs to."""

    shape: ModelShape
    dtype: Dtype
    lora: LoraConfig
    rows: int
    """Sequences per forward pass."""
    prompt_tokens: int
    attention: str
    """'eager' keeps the attention weights."""
    master_bytes: int
    """Per weight of the trainer."""
    device: Device

    @property
    def num_adapter(self) -> int:
        """Parameters of the adapter."""
        return self.lora.r * self.shape.adapted_width if self.lora.enabled else 0

    @property
    def in_autocast(self) -> bool:
        """Whether float32 weights are used in bfloat16."""
        return self.dtype == "bfloat16" and self.master_bytes == 4


def whole_logits(tokens: int, vocab_size: int) -> int:
    """Bytes of float32 logits over the vocabulary."""
    return tokens * vocab_size * 4


def _weights(on: Training) -> Iterator[Part]:
    """Weights, gradients, optimizer."""
    count, trained = on.shape.num_parameters, on.num_adapter or on.shape.num_parameters
    kind = f"{trained / 1e6:,.1f} M trained"
    yield Part(
        "weights", count * on.master_bytes, f"{count / 1e6:,.0f} M × {on.master_bytes} bytes"
    )
    if on.lora.enabled:
        yield Part("adapter", trained * 4, f"rank {on.lora.r}, {kind} × 4 bytes")
    if on.in_autocast:
        yield Part("bfloat16 copy", count * 2, "autocast's, of the float32 weights")
    yield Part("gradients", trained * 4, f"{kind} × 4 bytes")
    yield Part("AdamW", trained * ADAM_BYTES, f"{kind} × 8 bytes")


def _activations(on: Training, tokens: int) -> Part:
    """What the backward pass needs of `rows` sequences of `tokens`."""
    shape, count = on.shape, on.rows * tokens
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    numbers = 8 * shape.hidden_size + 5 * queries + 4 * keys + 4 * shape.intermediate_size
    low = on.dtype == "bfloat16"
    # An adapter's inputs and the norms are float32 in either format.
    one = count * numbers * (3 if low and not on.in_autocast else 4)
    if on.attention == "eager":
        one += count * tokens * shape.num_heads * (6 if low else 4)
    why = f"{on.rows} × {tokens:,} tokens, {shape.num_layers} layers"
    if not on.device.is_gpu:
        return Part("activations", one * shape.num_layers, why)
    kept = count * shape.hidden_size * (2 if low else 4) * shape.num_layers
    return Part("activations", kept + one, f"{why}, gradient checkpointing")


def _tiles(on: Training, tokens: int, shape: ModelShape) -> Part:
    """Log-probabilities of `tokens` tokens and their gradients."""
    cells = min(tokens, TILE_TOKENS) * min(shape.vocab_size, TILE_ROWS)
    tile = cells * NUMBER_BYTES[on.dtype]
    if not on.device.is_gpu:
        tile += int(cells * 4 * TORCH_COPIES)
    trained_head = 0 if on.lora.enabled else shape.vocab_size * shape.hidden_size * 4
    whole = whole_logits(tokens, shape.vocab_size)
    return Part(
        "log-probabilities",
        tile + tokens * shape.hidden_size * 4 + trained_head,
        f"in tiles; whole logits would be {whole / GB:,.1f} GB a copy, {LOGIT_COPIES} copies",
    )


def _scored(on: Training, completion: int) -> int:
    """Tokens whose log-probabilities are computed; without Triton the prompt's are too."""
    return on.rows * (completion + (0 if on.device.is_gpu else on.prompt_tokens))


def cache_gib(shape: ModelShape, sequences: int, length: int, number_bytes: int, total: int) -> int:
    """vLLM's key-value cache on a CPU with `total` bytes, in whole GiB."""
    need = sequences * length * shape.kv_token_bytes(number_bytes)
    return max(1, min(-(-need // GIB), total // CPU_CACHE_SHARE // GIB))


@dataclass(frozen=True)
class Sampling:
    """How a GRPO stage samples."""

    engine: str
    """'vllm' or 'transformers'."""
    max_num_seqs: int
    """Sequences that one engine generates at once at most."""


def _generation(on: Training, rows: int, completion: int) -> Part:
    """What the trainer's own model takes to write `rows` completions at a time."""
    length = on.prompt_tokens + completion
    return Part(
        "generation",
        rows * length * on.shape.kv_token_bytes(on.master_bytes) + rows * on.shape.vocab_size * 12,
        f"keys and values of {rows} × {length:,} tokens",
    )


def _sampler(
    on: Training, how: Sampling, own: int, completion: int, share: float | None
) -> Iterator[Part]:
    """What sampling `own` completions at a time takes beside the trainer. `share` is vLLM's of a
    GPU; None where it has a GPU of its own."""
    shape, length = on.shape, on.prompt_tokens + completion
    number = NUMBER_BYTES[on.dtype]
    if how.engine != "vllm":
        yield _generation(on, own, completion)
    elif not on.device.is_gpu:
        count = shape.num_parameters
        yield Part("vLLM's weights", count * number, f"a copy of its own, {number} bytes each")
        cache = cache_gib(shape, min(how.max_num_seqs, own), length, number, on.device.total)
        yield Part("vLLM's cache", cache * GIB, "keys and values, reserved")
    elif share is not None:
        why = f"vllm_memory_utilization = {share:g} of the device"
        yield Part("vLLM", int(share * on.device.total), why)


def grpo_parts(on: Training, grpo: GrpoConfig, how: Sampling, completion: int) -> tuple[Part, ...]:
    """What one device holds when completions are `completion` tokens long."""
    parts = [*_weights(on)]
    if grpo.beta and not on.lora.enabled:
        parts.append(Part("reference", on.shape.num_parameters * 4, "grpo.beta is not 0"))
    parts.append(_activations(on, on.prompt_tokens + completion))
    parts.append(_tiles(on, _scored(on, completion), on.shape))
    own = grpo.prompts_per_step * grpo.group_size // grpo.processes
    apart = grpo.vllm_mode == "server" and grpo.vllm_server_device is not None
    share = None if apart else grpo.vllm_memory_utilization
    parts += _sampler(on, how, own, completion, share)
    parts.append(_process(on))
    if grpo.processes == 1 or on.device.is_gpu:
        return tuple(parts)
    count = grpo.processes
    return tuple(
        Part(part.what, part.num_bytes * count, f"{count} processes, each {part.why}")
        for part in parts
    )


def sft_parts(on: Training, tokens: int, num_dev: int, dev_tokens: int) -> tuple[Part, ...]:
    """What SFT holds when examples are `tokens` long, prompt included, and `num_dev` dev questions
    at a time are answered in `dev_tokens`."""
    parts = [*_weights(on), _activations(on, tokens), _tiles(on, on.rows * tokens, on.shape)]
    if num_dev:
        parts.append(_generation(on, num_dev, dev_tokens))
    return (*parts, _process(on))


def opd_parts(
    on: Training,
    opd: OpdConfig,
    how: Sampling,
    teacher: ModelShape | None,
    completion: int,
    num_dev: int,
) -> tuple[Part, ...]:
    """What distillation holds when `num_dev` dev questions are answered at a time, whatever the
    sampler by the trainer's own model; without a teacher's shape that part is left out."""
    length = on.prompt_tokens + completion
    parts = [*_weights(on), _activations(on, length)]
    scored = _scored(on, completion)
    parts.append(_tiles(on, scored, on.shape))
    if teacher is not None:
        count, number = teacher.num_parameters, NUMBER_BYTES[on.dtype]
        parts.append(Part("teacher", count * number, f"{count / 1e6:,.0f} M × {number} bytes"))
        parts.append(_tiles(on, scored, teacher))
    own = opd.batch_size
    if how.engine != "vllm":
        own = max(own, num_dev)  # written one after the other
    elif num_dev:
        parts.append(_generation(on, num_dev, completion))
    parts += _sampler(on, how, own, completion, opd.vllm_memory_utilization)
    return (*parts, _process(on))


def _process(on: Training) -> Part:
    return Part("process", PROCESS_BYTES[on.device.is_gpu], "libraries, before any model")


def training(
    section: GrpoConfig | SftConfig | OpdConfig,
    shape: ModelShape,
    dtype: Dtype,
    prompt_tokens: int,
    device: Device,
) -> Training:
    """What the estimate knows of a stage's training process. Only GRPO with LoRA holds the weights
    in the run's number format; all else trains in float32, under autocast where it isn't that."""
    attention, master = "eager", 4
    if isinstance(section, SftConfig):
        attention = section.attention
    elif isinstance(section, GrpoConfig):
        attention = "eager" if dtype == "bfloat16" else "sdpa"
        master = NUMBER_BYTES[dtype] if section.lora.enabled else 4
    return Training(
        shape=shape,
        dtype=dtype,
        lora=section.lora,
        rows=section.micro_batch_size,
        prompt_tokens=prompt_tokens,
        attention=attention,
        master_bytes=master,
        device=device,
    )
