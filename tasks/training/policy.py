"""The policy that a training stage hands on: the one that did best on dev questions, as one full
model on disk that says what the trained policy said.

An adapter is merged in float32 (a merge in bfloat16 would round the sum twice) and the result is
cast to the run's dtype. The checkpoint is then loaded again and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from tasks.models.checkpoints import CHECKPOINT, save_checkpoint
from tasks.models.reload_check import ReloadCheck, compare_reloaded, fixed_logprobs
from tasks.sync.adapter import ADAPTER, save_adapter
from tasks.training.dev_check import best_step
from tasks.training.resume import PREFIX


def best_policy(trainer: Any, rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]) -> Any:
    """The policy that did best on dev questions by the `metrics` rows, the last one where none
    were answered. The trained model is written to."""
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    best = best_step(rows)
    if best is None or best == rows[-1]["step"]:
        return policy
    log(f"the policy of step {best} did best on the dev questions and is kept")
    folder = Path(trainer.args.output_dir) / f"{PREFIX}{best}"
    if isinstance(policy, PeftModel):
        weights = load_peft_weights(str(folder), device=str(policy.device))
        outcome = set_peft_model_state_dict(policy, weights, adapter_name=ADAPTER)
        assert not outcome.unexpected_keys, outcome.unexpected_keys[:3]
        return policy
    with torch.device(policy.device):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=policy.dtype, attn_implementation=policy.config._attn_implementation
        )


def save_policy(
    policy: Any,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    texts: Sequence[str],
    *,
    dtype: str,
    attention: str,
) -> ReloadCheck:
    """Write `checkpoint/` in `dtype` and, with LoRA, `adapter/`; reload and compare on `texts`.

    RuntimeError when the reloaded checkpoint isn't the trained model.
    """
    before = fixed_logprobs(policy, tokenizer, texts)
    device = policy.device
    if isinstance(policy, PeftModel):
        save_adapter(policy, out_dir / "adapter")
        policy = policy.float().merge_and_unload()
    folder = out_dir / CHECKPOINT
    save_checkpoint(policy.to(getattr(torch, dtype)), tokenizer, folder)
    return compare_reloaded(before, folder, texts, dtype=dtype, attention=attention, device=device)
