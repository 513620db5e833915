"""The dev check of GRPO: at every checkpoint the policy answers dev questions, and the best wins.

They are answered by the sampler that training uses. Training rewards say how well the policy does
on what it is paid for; this says whether it got better, and which checkpoint the stage hands on
(`tasks.training.dev_check`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from tasks.sampling.engines.base import EngineSpec
from tasks.training.dev_check import DevQuestions, answers_in_training

if TYPE_CHECKING:
    from tasks.grpo.trainer import RolloutTrainer


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
        figures = self.questions.figures(self._every_answer(self.trainer, state.global_step))
        figures["dev_seconds"] = time.perf_counter() - start
        for name, value in figures.items():
            self.trainer._add(name, value)

    def _every_answer(self, trainer: RolloutTrainer, step: int) -> list[str]:
        """The answers to all questions; each training process gives its share of them."""
        count, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        prompts = self.questions.prompts
        share = -(-len(prompts) // count)
        mine = [*prompts[rank::count], prompts[0]][:share]  # a server is asked equally by all
        found = gather_object(self._answers(trainer, step, replace(self.questions, prompts=mine)))
        return [found[i % count * share + i // count] for i in range(len(prompts))]

    def _answers(self, trainer: RolloutTrainer, step: int, questions: DevQuestions) -> list[str]:
        if not trainer.use_vllm:
            policy = trainer.accelerator.unwrap_model(trainer.model)
            return answers_in_training(policy, questions, self.spec)
        from tasks.sampling.engines.base import as_samples

        trainer.vllm_generation.sync_as(step)
        trainer._last_loaded_step = step  # the next batch is sampled from this version
        answers = trainer.vllm_generation.sample(
            questions.prompts, n=1, temperature=0.0, max_tokens=questions.max_tokens
        )
        samples = as_samples(self.spec, [answer.token_ids for answer in answers])
        return [sample.text for sample in samples]
