"""Dev questions: what says on the way whether training made the policy better.

The questions are those of role 'dev' (never those of the final comparison), answered greedily
whenever a checkpoint is due and judged by the verifier, apart from all rewards and losses. Their
figures are part of the step's log, which lies in every checkpoint: a resumed run knows what an
uninterrupted one would. The checkpoint that does best on them is what a training stage hands on
(`tasks.training.policy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate.utils import gather_object
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratchet.config.run import ModelConfig, PromptConfig
from ratchet.prompts import STYLE_OF, answer_start, prompt_ids, prompt_text
from ratchet.store.store import Artifact
from ratchet.verifier import Style, verify_batch
from tasks.sampling.engines.base import EngineSpec, as_samples
from tasks.sampling.engines.transformers_engine import TransformersSampler
from tasks.training.callbacks import BoundCallback

DEV_STRICT = "dev_strict"
DEV_LENIENT = "dev_lenient"
DEV_SECONDS = "dev_seconds"


@dataclass(frozen=True)
class EvalSet:
    """Questions as they are put to a model."""

    prompts: list[list[int]]
    """Token ids."""
    golds: list[str]
    style: Style
    max_tokens: int
    """Longest answer."""
    prefilled: str
    """What the chat template writes of every answer."""

    @staticmethod
    def of(
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        model: ModelConfig,
        prompt: PromptConfig,
        max_tokens: int,
    ) -> EvalSet:
        """The rows of the questions table, at least one, as they are put to `model`."""
        thinking = model.enable_thinking
        texts = [row["question"] for row in rows]
        first = prompt_text(tokenizer, prompt.format, texts[0], enable_thinking=thinking)
        return EvalSet(
            [
                prompt_ids(tokenizer, prompt.format, text, enable_thinking=thinking)
                for text in texts
            ],
            [row["gold"] for row in rows],
            STYLE_OF[prompt.format],
            max_tokens,
            answer_start(first),
        )

    def first(self, count: int) -> EvalSet:
        """Its first questions."""
        return replace(self, prompts=self.prompts[:count], golds=self.golds[:count])

    def accuracy(self, answers: Sequence[str]) -> tuple[float, float]:
        """Shares of strictly and leniently right answers."""
        texts = [self.prefilled + answer for answer in answers]
        verdicts = verify_batch(texts, self.golds, self.style)
        return (
            sum(verdict.strict for verdict in verdicts) / len(verdicts),
            sum(verdict.lenient for verdict in verdicts) / len(verdicts),
        )


def dev_set(
    inputs: Mapping[str, Artifact],
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    prompt: PromptConfig,
    *,
    count: int,
    max_tokens: int,
) -> EvalSet | None:
    """The first `count` dev questions of a run; None where there are none or none are wanted."""
    table = inputs["questions"].table("questions", ["role", "question", "gold"])
    rows = [row for row in table.to_pylist() if row["role"] == "dev"][:count]
    return EvalSet.of(rows, tokenizer, model, prompt, max_tokens) if rows else None


def greedy_answers(
    model: PreTrainedModel | PeftModel, eval_set: EvalSet, spec: EngineSpec
) -> list[str]:
    """Greedy answers by a model's own weights; it is left in the mode it was in."""
    training = model.training
    sampler = TransformersSampler(spec, model.eval())
    found = sampler.generate(
        eval_set.prompts, n=1, temperature=0.0, max_tokens=eval_set.max_tokens, seed=0
    )
    model.train(training)
    return [samples[0].text for samples in found]


class DevCheckCallback(BoundCallback):
    """Answers the dev questions whenever a checkpoint is due; with `patience`, training ends after
    that many checkpoints in a row that are worse than the best.

    With `by_engine` the vLLM engine that training samples with answers, else the trained weights.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        eval_set: EvalSet,
        spec: EngineSpec,
        *,
        by_engine: bool = False,
        patience: int | None = None,
    ) -> None:
        self.log = log
        self.eval_set = eval_set
        self.spec = spec
        self.by_engine = by_engine
        self.patience = patience
        self.seconds = 0.0
        """Spent in this attempt."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after the weights have changed; it has decided about saving."""
        if not control.should_save:
            return
        start = time.perf_counter()
        strict, lenient = self.eval_set.accuracy(self._every_answer(state.global_step))
        seconds = time.perf_counter() - start
        self.seconds += seconds
        figures = {DEV_STRICT: strict, DEV_LENIENT: lenient, DEV_SECONDS: seconds}
        for name, value in figures.items():
            self.trainer._metrics["train"][name].append(value)
        self.log(f"step {state.global_step}: {strict:.1%} strict on dev questions")
        if self.used_up([*state.log_history, {"step": state.global_step} | figures]):
            control.should_training_stop = True

    def used_up(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether training has to end after what was logged."""
        best = best_step(rows)
        if best is None or self.patience is None:
            return False
        later = [row for row in rows if row.get(DEV_STRICT) is not None and row["step"] > best]
        return len(later) >= self.patience

    def _every_answer(self, step: int) -> list[str]:
        """The answers to all questions; each training process gives its share of them."""
        accelerator, prompts = self.trainer.accelerator, self.eval_set.prompts
        count, rank = accelerator.num_processes, accelerator.process_index
        share = -(-len(prompts) // count)
        mine = [*prompts[rank::count], prompts[0]][:share]  # a server is asked equally by all
        answer = self._by_engine if self.by_engine else self._by_trained
        found = gather_object(answer(step, replace(self.eval_set, prompts=mine)))
        return [found[i % count * share + i // count] for i in range(len(prompts))]

    def _by_trained(self, step: int, eval_set: EvalSet) -> list[str]:
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return greedy_answers(policy, eval_set, self.spec)

    def _by_engine(self, step: int, eval_set: EvalSet) -> list[str]:
        sampler = self.trainer.vllm_generation
        sampler.sync_as(step)
        self.trainer._last_loaded_step = step  # the next batch is sampled from this version
        answers = sampler.sample(
            eval_set.prompts, n=1, temperature=0.0, max_tokens=eval_set.max_tokens
        )
        samples = as_samples(self.spec, [answer.token_ids for answer in answers])
        return [sample.text for sample in samples]


def best_step(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The step whose policy did best on the dev questions, of equal ones the later; None where
    none was checked."""
    checked = [row for row in rows if row.get(DEV_STRICT) is not None]
    if not checked:
        return None
    return int(max(checked, key=lambda row: (row[DEV_STRICT], row["step"]))["step"])


def dev_summary(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | int]:
    """Figures for a stage's summary; none where nothing was checked."""
    best = best_step(metrics)
    if best is None:
        return {}
    by_step = {row["step"]: row[DEV_STRICT] for row in metrics if row.get(DEV_STRICT) is not None}
    return {
        "best_step": best,
        "dev_strict_best": by_step[best],
        "dev_strict_last": by_step[max(by_step)],
    }


def describe_chosen(summary: Mapping[str, Any]) -> str:
    """Which policy is the result, for people; `summary` holds `dev_summary`."""
    if "best_step" not in summary:
        return "The last policy is the result: no dev questions were answered."
    return (
        f"The policy of step {summary['best_step']} is the result: "
        f"{summary['dev_strict_best']:.1%} strict on the dev questions, the last one "
        f"{summary['dev_strict_last']:.1%}."
    )
