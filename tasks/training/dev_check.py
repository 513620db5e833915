"""Dev questions: what says on the way whether training made the policy better.

The questions are those of role 'dev' (never those of the final comparison), answered greedily and
judged by the verifier, apart from all rewards and losses. The checkpoint that does best on them is
what a training stage hands on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ratchet.config.run import ModelConfig, PromptConfig
from ratchet.prompts import STYLE_OF, answer_start, prompt_ids, prompt_text
from ratchet.store.store import Artifact
from ratchet.verifier import Style, verify_batch
from tasks.sampling.engines.base import EngineSpec
from tasks.sampling.engines.transformers_engine import TransformersSampler
from tasks.sync.adapter import ADAPTER
from tasks.training.resume import PREFIX

DEV_STRICT = "dev_strict"
DEV_LENIENT = "dev_lenient"


@dataclass(frozen=True)
class DevQuestions:
    """Held-out questions as they are put to the policy."""

    prompts: list[list[int]]
    """Token ids."""
    golds: list[str]
    style: Style
    max_tokens: int
    """Longest answer."""
    prefilled: str = ""
    """What the chat template writes of every answer."""

    def figures(self, answers: list[str]) -> dict[str, float]:
        """Shares of strictly and leniently right answers."""
        texts = [self.prefilled + answer for answer in answers]
        verdicts = verify_batch(texts, self.golds, self.style)
        return {
            DEV_STRICT: sum(verdict.strict for verdict in verdicts) / len(verdicts),
            DEV_LENIENT: sum(verdict.lenient for verdict in verdicts) / len(verdicts),
        }


def dev_questions(
    inputs: Mapping[str, Artifact],
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    prompt: PromptConfig,
    *,
    count: int,
    max_tokens: int,
) -> DevQuestions | None:
    """The first `count` dev questions of a run; None where there are none or none are wanted."""
    table = inputs["questions"].table("questions", ["role", "question", "gold"])
    rows = [row for row in table.to_pylist() if row["role"] == "dev"][:count]
    if not rows:
        return None
    thinking = model.enable_thinking
    prompts = [
        prompt_ids(tokenizer, prompt.format, row["question"], enable_thinking=thinking)
        for row in rows
    ]
    text = prompt_text(tokenizer, prompt.format, rows[0]["question"], enable_thinking=thinking)
    return DevQuestions(
        prompts,
        [row["gold"] for row in rows],
        STYLE_OF[prompt.format],
        max_tokens,
        answer_start(text),
    )


def answers_in_training(
    policy: PreTrainedModel | PeftModel, questions: DevQuestions, spec: EngineSpec
) -> list[str]:
    """Greedy answers of a policy that is being trained, by its own weights; it is left in the mode
    it was in."""
    training = policy.training
    sampler = TransformersSampler(spec, policy.eval())
    found = sampler.generate(
        questions.prompts, n=1, temperature=0.0, max_tokens=questions.max_tokens, seed=0
    )
    policy.train(training)
    return [samples[0].text for samples in found]


def best_step(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    """The step whose policy did best on the dev questions, of equal ones the later; None where
    none was checked."""
    checked = [row for row in metrics if row.get(DEV_STRICT) is not None]
    if not checked:
        return None
    return int(max(checked, key=lambda row: (row[DEV_STRICT], row["step"]))["step"])


def dev_summary(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | int]:
    """Figures for a stage's summary; none where nothing was checked."""
    checked = [row for row in metrics if row.get(DEV_STRICT) is not None]
    if not checked:
        return {}
    best = best_step(checked)
    assert best is not None
    return {
        "best_step": best,
        "dev_strict_best": next(row[DEV_STRICT] for row in checked if row["step"] == best),
        "dev_strict_last": checked[-1][DEV_STRICT],
    }


def chosen_words(summary: Mapping[str, Any]) -> str:
    """Which policy is the result, for people; `summary` holds `dev_summary`."""
    if "best_step" not in summary:
        return "The last policy is the result: no dev questions were answered."
    return (
        f"The policy of step {summary['best_step']} is the result: "
        f"{summary['dev_strict_best']:.1%} strict on the dev questions, the last one "
        f"{summary['dev_strict_last']:.1%}."
    )


def policy_of(trained: Any, training_folder: Path, step: int) -> Any:
    """The policy as it was after `step`, from the checkpoint kept of it; `trained` is the model
    that was trained and may be written to."""
    folder = training_folder / f"{PREFIX}{step}"
    if isinstance(trained, PeftModel):
        weights = load_peft_weights(str(folder), device=str(trained.device))
        outcome = set_peft_model_state_dict(trained, weights, adapter_name=ADAPTER)
        assert not outcome.unexpected_keys, outcome.unexpected_keys[:3]
        return trained
    with torch.device(trained.device):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=trained.dtype, attn_implementation=trained.config._attn_implementation
        )
