"""The dev check: at every checkpoint the policy answers held-out questions, and the best one wins.

The questions are those of role 'dev' (never those of the final comparison), answered greedily by
the sampler that training uses and judged by the verifier, apart from all rewards. Training
rewards say how well the policy does on what it is paid for; this says whether it got better, and
which checkpoint the stage hands on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback

from ratchet.config import ModelConfig, PromptConfig
from ratchet.prompts import STYLE_OF, prompt_ids
from ratchet.store.store import Artifact
from ratchet.verifier import Style, verify_batch
from tasks.resume import PREFIX
from tasks.sampler.base import EngineSpec
from tasks.sync.adapter import ADAPTER

if TYPE_CHECKING:
    from tasks.rl.trainer import RolloutTrainer

DEV_STRICT = "dev_strict"


@dataclass(frozen=True)
class DevQuestions:
    """Held-out questions as they are put to the policy."""

    prompts: list[list[int]]
    """Token ids."""
    golds: list[str]
    style: Style
    max_tokens: int
    """Longest answer."""


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
    return DevQuestions(prompts, [row["gold"] for row in rows], STYLE_OF[prompt.format], max_tokens)


class DevCheck(TrainerCallback):
    """Answers the dev questions whenever a checkpoint is due; the figures join the step's row."""

    def __init__(self, questions: DevQuestions, spec: EngineSpec) -> None:
        self.questions = questions
        self.spec = spec
        self.trainer: RolloutTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after the weights have changed; it has decided about saving."""
        if not control.should_save:
            return
        assert self.trainer is not None
        start = time.perf_counter()
        texts = self._answers(self.trainer, state.global_step)
        verdicts = verify_batch(texts, self.questions.golds, self.questions.style)
        figures = {
            DEV_STRICT: sum(verdict.strict for verdict in verdicts) / len(verdicts),
            "dev_lenient": sum(verdict.lenient for verdict in verdicts) / len(verdicts),
            "dev_seconds": time.perf_counter() - start,
        }
        for name, value in figures.items():
            self.trainer._add(name, value)

    def _answers(self, trainer: RolloutTrainer, step: int) -> list[str]:
        prompts, max_tokens = self.questions.prompts, self.questions.max_tokens
        if not trainer.use_vllm:
            from tasks.sampler.transformers_engine import TransformersSampler

            policy = trainer.accelerator.unwrap_model(trainer.model)
            training = policy.training
            sampler = TransformersSampler(self.spec, policy.eval())
            found = sampler.generate(prompts, n=1, temperature=0.0, max_tokens=max_tokens, seed=0)
            policy.train(training)
            return [samples[0].text for samples in found]
        from tasks.sampler.base import as_samples
        from tasks.sync.handle import handle_of

        handle = handle_of(trainer.vllm_generation)
        handle.sync(step)
        trainer._last_loaded_step = step  # the next batch is sampled from this version
        answers = handle.sample(prompts, n=1, temperature=0.0, max_tokens=max_tokens)
        samples = as_samples(self.spec, [answer.token_ids for answer in answers])
        return [sample.text for sample in samples]


def best_step(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    """The step whose policy did best on the dev questions, of equal ones the later; None where
    none was checked."""
    checked = [row for row in metrics if row.get(DEV_STRICT) is not None]
    if not checked:
        return None
    return int(max(checked, key=lambda row: (row[DEV_STRICT], row["step"]))["step"])


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
