"""How adapters are set up, in every stage that trains them."""

from __future__ import annotations

from peft import LoraConfig as PeftLoraConfig

from ratchet.config.run import LoraConfig


def lora_config(lora: LoraConfig) -> PeftLoraConfig | None:
    """Adapters on every linear layer but the head, without dropout (it would perturb the trainer's
    log-probs and not the sampler's); None for full fine-tuning."""
    if not lora.enabled:
        return None
    return PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
