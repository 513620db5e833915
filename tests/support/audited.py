"""Trainers with their samplers, made small, to be audited and to have faults put into them.

Not a test module. A `Kind` says which model and which sync; `open_kind` makes the pair as the
audit stage makes it, with a real engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ratchet.config.run import (
    AuditConfig,
    GrpoConfig,
    LoraConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
)
from tests.support.tiny_grpo import SEEDLING, context
from tests.support.tiny_model import tiny_tokenizer

KEY_BIAS = 5.0
"""Standard deviation of the key biases, which Qwen2.5 has as large."""


def biased_qwen2(folder: Path, vocab_size: int | None = None) -> Path:
    """A random Qwen2 with large key biases and tied embeddings, saved with its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=KEY_BIAS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Kind:
    """A trainer and its sampler."""

    model: str
    """'qwen2' or 'qwen3'."""
    sync: str
    """'adapter', 'merged', or 'full' for full fine-tuning."""
    dtype: str = "float32"
    mode: str = "colocate"
    note: str = ""
    """What else is special."""

    def __str__(self) -> str:
        full = "full fine-tuning" if self.sync == "full" else self.sync
        parts = (self.model, full, self.dtype, self.mode, self.note)
        return ", ".join(part for part in parts if part)


@dataclass
class Pair:
    """An open pair."""

    kind: Kind
    trainer: Any
    settings: Any

    @property
    def generation(self) -> Any:
        """TRL's backend."""
        return self.trainer.vllm_generation

    @property
    def names(self) -> list[str]:
        """The trainer's weights but for the adapter's, tied ones once."""
        found = self.trainer.model.named_parameters()
        return [name for name, _ in found if ".lora_" not in name]

    @property
    def llm(self) -> Any:
        """The engine."""
        return self.generation.llm

    def audit(self, num_syncs: int) -> Any:
        """Audit it."""
        from tasks.audit.probe import run_audit

        settings = replace(self.settings, num_syncs=num_syncs)
        return run_audit(self.trainer, settings)


@contextmanager
def open_kind(kind: Kind, folder: Path) -> Iterator[Pair]:
    """The pair, closed on leaving."""
    from tasks.stages.audit import open_pair

    source = SEEDLING if kind.model == "qwen3" else biased_qwen2(folder / "source")
    trainer, settings = open_pair(
        context(folder, source),
        ModelConfig(dtype=kind.dtype),
        PromptConfig(format=PromptFormat.TAGS_SHORT),
        SamplerConfig(engine="vllm", max_completion_tokens=32),
        GrpoConfig(
            prompts_per_step=2,
            group_size=8,
            micro_batch_size=8,
            lora=LoraConfig(enabled=kind.sync != "full", r=4, alpha=8),
            sync="merged" if kind.sync == "merged" else "auto",
            vllm_mode=kind.mode,
        ),
        AuditConfig(),
    )
    try:
        yield Pair(kind, trainer, settings)
    finally:
        trainer.vllm_generation.close()
