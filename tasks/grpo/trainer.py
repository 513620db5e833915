"""TRL's `GRPOTrainer` with our prompts, seeds and records.

What is added, and why a subclass is needed for it:

* Prompts are tokenised by `ratchet.prompts` and by nothing else, so the trainer, the sampler and
  the presampling stage see the same tokens.
* Everything random in a step (sampling, the shuffle before micro-batches) is drawn from a seed
  made of the run's seed, the step and the process: a resumed run repeats what it would have done.
* Every completion is verified and kept, with its rewards, advantage and policy version; the
  figures to watch are added to what TRL logs, once per optimizer step.
* Groups without reward variance can be replaced before the gradient step
  (`tasks.grpo.dynamic_sampling`).
* Every batch passes the drift guard before it is trained on (`tasks.grpo.drift_guard`).

`clip_ratio/*` is left out of the metrics while `num_iterations` is 1: every batch is then used for
one step, the ratio is 1 by construction, and the figure would say nothing.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from trl import GRPOTrainer

from ratchet.errors import UserError
from ratchet.rollouts.training_log import TrainingLog
from ratchet.verifier import Style, verify_batch
from tasks.grpo.data import Prompts
from tasks.grpo.drift_guard import DriftGuardCallback
from tasks.grpo.dynamic_sampling import Answer, Draw, DynamicBatch, replace_dead_groups
from tasks.grpo.figures import Surprise, sampling_figures
from tasks.grpo.rollout import Rollout, Scoring
from tasks.training.seeds import step_seed


class RolloutTrainer(GRPOTrainer):
    """`GRPOTrainer` whose every completion is accounted for."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        style: Style,
        training_log: TrainingLog,
        drift_guard: DriftGuardCallback,
        refill_rounds: int = 0,
        **kwargs: Any,
    ) -> None:
        self.prompts = prompts
        self.style = style
        self.training_log = training_log
        self.drift_guard = drift_guard
        self.refill_rounds = refill_rounds
        self.rollout: Rollout | None = None
        self.drawn: Answer | None = None
        self.draw = 0
        self.selected = False
        self.surprise = Surprise()
        self.sampled_at = -1
        self._step_start = 0.0
        self._generate_seconds = 0.0
        self._guard_seconds = 0.0
        super().__init__(**kwargs)
        self.add_callback(drift_guard)

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [self.prompts.ids[text] for text in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        step = self.sampled_at = self.state.global_step
        start = time.perf_counter()
        rank = self.accelerator.process_index
        torch.manual_seed(step_seed(self.args.seed, step, rank, self.draw))
        if self.use_vllm:
            self.vllm_generation.next_version = step
        answer = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._generate_seconds += time.perf_counter() - start
        self._add("policy_version", step)
        if self.use_vllm:
            sync = self.vllm_generation.last_sync
            assert sync.policy_version == step, f"sampled from {sync.policy_version}, not {step}"
            self._add("sync_seconds", sync.seconds)
            self._add("sync_bytes", sync.num_bytes)
        return answer

    def _generate(self, prompts: list[str]) -> Answer:
        """TRL's, or what was drawn for this batch already."""
        if self.drawn is None:
            answer: Answer = super()._generate(prompts)
            return answer
        answer, self.drawn = self.drawn, None
        return answer

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[str],
        completions: list[str],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        answers = [self.prompts.prefilled + text for text in completions]
        gathered = super()._calculate_rewards(inputs, prompts, answers, completion_ids_list)
        first = self.accelerator.process_index * len(prompts)
        mine = gathered[first : first + len(prompts)].cpu()
        verdicts = verify_batch(answers, [row["gold"] for row in inputs], self.style)
        self.rollout = Rollout(
            inputs, completions, completion_ids_list, verdicts, mine, self._scoring()
        )
        return gathered

    def _scoring(self) -> Scoring:
        return Scoring(
            self.num_generations,
            tuple(self.reward_func_names),
            self.reward_weights.cpu(),
            frozenset(self.eos_token_ids),
        )

    def _draw(self, inputs: list[dict[str, Any]], number: int) -> Draw:
        """Sample whole groups as draw `number` of this step, and score them."""
        self.draw = number
        prompts = [row["prompt"] for row in inputs]
        answer = self._generate(prompts)
        self._calculate_rewards(inputs, prompts, answer[3], answer[1])
        assert self.rollout is not None
        return Draw(answer, self.rollout)

    def _sample_dynamically(self, inputs: list[dict[str, Any]]) -> DynamicBatch:
        """The batch of this step, its dead groups replaced as far as the budget allows."""
        seed = f"{self.args.seed}/{self.state.global_step}"
        found = replace_dead_groups(
            self._draw(inputs, 0),
            self._draw,
            self.prompts.rows,
            max_rounds=self.refill_rounds,
            seed=seed,
        )
        self.draw, self.drawn = 0, found.batch.answer
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._generate_seconds = 0.0
        dynamic = self._sample_dynamically(inputs) if self.refill_rounds else None
        self.selected = dynamic is not None and dynamic.num_rounds > 0
        if dynamic is not None:
            inputs = dynamic.batch.rollout.inputs
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.state.global_step == 0:
            self._check_prompt_tokens(inputs, scored)
        assert self.rollout is not None
        self._keep(self.rollout, dynamic, scored["advantages"].tolist())
        start = time.perf_counter()
        figures = self._over_processes(sampling_figures(scored))
        for name, value in figures.items():
            self._add(name, value)
        self.drift_guard.check_batch(self, scored, figures)
        self._guard_seconds = time.perf_counter() - start
        return scored

    def _keep(
        self, trained: Rollout, dynamic: DynamicBatch | None, advantages: list[float]
    ) -> None:
        """Write down every completion that was sampled, and log figures of them.

        Accuracy, statuses and lengths are those of the first draw, which nobody selected.
        """
        first = trained if dynamic is None else dynamic.first
        discarded = () if dynamic is None else dynamic.discarded
        num_tokens = sum(rollout.num_tokens for rollout in (trained, *discarded))
        figures = first.answer_shares() | trained.live_shares()
        figures |= {} if dynamic is None else dynamic.figures()
        figures |= {
            "sampled_tokens": float(num_tokens * self.accelerator.num_processes),
            "generate_seconds": self._generate_seconds,
        }
        for name, value in self._over_processes(figures).items():
            self._add(name, value)
        step, rank = self.state.global_step + 1, self.accelerator.process_index
        rows = trained.rows(step, first=rank * len(trained.inputs), advantages=advantages)
        for rollout in discarded:
            rows += rollout.rows(step, advantages=None)
        self.training_log.write_rollouts(step, rank, rows)

    def _over_processes(self, figures: dict[str, float]) -> dict[str, float]:
        """Each figure's mean over the processes, the largest for a maximum; for a standard error
        that of the mean."""
        if not figures:
            return {}
        values = [list(figures.values())]
        mine = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        every = self.accelerator.gather(mine)
        means, largest = every.mean(dim=0).tolist(), every.amax(dim=0).tolist()
        errors = (every.square().sum(dim=0).sqrt() / len(every)).tolist()
        by_ending = {"_max": largest, "_se": errors}
        return {
            name: by_ending.get(name[name.rfind("_") :], means)[i] for i, name in enumerate(figures)
        }

    def _check_prompt_tokens(self, inputs: list[dict[str, Any]], scored: dict[str, Any]) -> None:
        """The tokens that are trained on are those of the prompt, once, with nothing added."""
        for row, ids, mask in zip(inputs, scored["prompt_ids"], scored["prompt_mask"], strict=True):
            assert ids[mask.bool()].tolist() == self.prompts.ids[row["prompt"]], row["question_id"]

    def _add(self, name: str, value: float) -> None:
        self._metrics["train"][name].append(value)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **kwargs: Any
    ) -> Any:
        answer = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, **kwargs
        )
        logps, entropies, _ = answer
        # In the first pass over a batch the policy is still the one that sampled it.
        if entropies is not None and self.sampled_at == self.state.global_step:
            self.surprise.add(logps, entropies, attention_mask[:, -logits_to_keep:])
        return answer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, timed from the first micro-batch of an optimizer step; after the last one the
        guard sees the step, before the weights change."""
        count = self.args.gradient_accumulation_steps
        if self._step % count == 0:
            self._step_start = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        if self._step % count == 0:
            start = time.perf_counter()
            surprise = self._take_surprise()
            self.drift_guard.check_step(self, surprise)
            self._add("guard_seconds", self._guard_seconds + time.perf_counter() - start)
            self._guard_seconds = 0.0
        return loss

    def _take_surprise(self) -> tuple[float, float] | None:
        """The surprise of the step, logged; None in a second pass over a batch, and for groups
        that were chosen by how they came out."""
        if self.sampled_at != self.state.global_step:
            return None
        mean, error = self.surprise.take()
        if self.selected:
            return None
        figures = self._over_processes({"surprise_mean": mean, "surprise_se": error})
        for name, value in figures.items():
            self._add(name, value)
        return figures["surprise_mean"], figures["surprise_se"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with our figures added.

        UserError when the gradient was not finite: the weights are lost then.
        """
        if "loss" not in logs:  # the closing line of a training run
            super().log(logs, start_time)
            return
        step = self.state.global_step
        if not math.isfinite(logs["grad_norm"]):
            raise UserError(
                f"the gradient of GRPO step {step} is {logs['grad_norm']}, so the weights are "
                "lost: lower grpo.learning_rate, or set model.dtype = 'float32'"
            )
        if self.num_iterations == 1:
            for name in [name for name in self._metrics["train"] if name.startswith("clip_ratio")]:
                del self._metrics["train"][name]
        seconds = time.perf_counter() - self._step_start
        self._add("step_seconds", seconds)
        if sampled := self._metrics["train"].get("sampled_tokens"):
            self._add("tokens_per_second", sampled[-1] / seconds)
        super().log(logs, start_time)
