"""TRL's `GRPOTrainer` with our prompts, seeds and records.

What is added, and why a subclass is needed for it:

* Prompts are tokenised by `ratchet.prompts` and by nothing else, so the trainer, the sampler and
  the presampling stage see the same tokens.
* Everything random in a step (sampling, the shuffle before micro-batches) is drawn from a seed
  made of the run's seed, the step and the process: a resumed run repeats what it would have done.
* Every completion is verified and kept, with its rewards, advantage and policy version; the
  figures to watch are added to what TRL logs, once per optimizer step.
* Every batch passes the drift guard before it is trained on (`ratchet.drift`).

`clip_ratio/*` is left out of the metrics while `num_iterations` is 1: every batch is then used for
one step, the ratio is 1 by construction, and the figure would say nothing.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer

from ratchet.errors import UserError
from ratchet.step_records import StepRecords
from ratchet.verifier import Style, Verdict, verify_batch
from ratchet.verifier.types import status_rates
from tasks.rl.data import Prompts
from tasks.rl.figures import Surprise, live_groups, sampling_figures
from tasks.rl.halt import Oversight

Logged = dict[str, float | int | None]


@dataclass(frozen=True)
class Rollout:
    """What one process sampled for one step, before advantages are known."""

    inputs: list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    verdicts: list[Verdict]
    rewards: torch.Tensor
    """Shape (completions, reward functions); NaN where a reward does not apply."""


def step_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for every (run, step, process)."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


class RolloutTrainer(GRPOTrainer):
    """`GRPOTrainer` whose every completion is accounted for.

    `on_step(step, figures)` is called after each optimizer step with everything that was logged.
    """

    def __init__(
        self,
        *,
        prompts: Prompts,
        style: Style,
        records: StepRecords,
        oversight: Oversight,
        on_step: Callable[[int, Logged], None],
        **kwargs: Any,
    ) -> None:
        self.prompts = prompts
        self.style = style
        self.records = records
        self.oversight = oversight
        self.on_step = on_step
        self.rollout: Rollout | None = None
        self.surprise = Surprise()
        self.sampled_at = -1
        self._step_start = 0.0
        self._guard_seconds = 0.0
        super().__init__(**kwargs)
        oversight.begin(self)

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [self.prompts.ids[text] for text in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        step = self.sampled_at = self.state.global_step
        start = time.perf_counter()
        torch.manual_seed(step_seed(self.args.seed, step, self.accelerator.process_index))
        if self.use_vllm:
            self.vllm_generation.next_version = step
        answer = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._add("generate_seconds", time.perf_counter() - start)
        self._add("policy_version", step)
        if self.use_vllm:
            sync = self.vllm_generation.last_sync
            assert sync.policy_version == step, f"sampled from {sync.policy_version}, not {step}"
            self._add("sync_seconds", sync.seconds)
            self._add("sync_bytes", sync.num_bytes)
        return answer

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[str],
        completions: list[str],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        gathered = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        verdicts = verify_batch(completions, [row["gold"] for row in inputs], self.style)
        first = self.accelerator.process_index * len(prompts)
        mine = gathered[first : first + len(prompts)]
        self.rollout = Rollout(inputs, completions, completion_ids_list, verdicts, mine.cpu())
        for name, value in self._shares(self.rollout).items():
            self._log_metric(name, value)  # TRL averages these over processes
        return gathered

    def _shares(self, rollout: Rollout) -> dict[str, float]:
        """Figures of this process's completions that are means over completions."""
        count = len(rollout.completions)
        lengths = [len(ids) for ids in rollout.completion_ids]
        live = live_groups(self._totals(rollout.rewards), self.num_generations)
        in_live = live.repeat_interleave(self.num_generations).tolist()
        shares = {
            "strict": sum(verdict.strict for verdict in rollout.verdicts) / count,
            "lenient": sum(verdict.lenient for verdict in rollout.verdicts) / count,
            "truncated_share": sum(map(self._truncated, rollout.completion_ids)) / count,
            "mean_tokens": sum(lengths) / count,
            "live_share": sum(in_live) / count,
            "live_token_share": sum(n for n, on in zip(lengths, in_live, strict=True) if on)
            / sum(lengths),
        }
        rates = status_rates(verdict.status for verdict in rollout.verdicts)
        return shares | {f"status/{status}": rate for status, rate in rates.items()}

    def _truncated(self, ids: list[int]) -> bool:
        return ids[-1] not in self.eos_token_ids

    def _totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """Weighted sums of rewards (completions, functions), NaN where none applies."""
        totals = (rewards * self.reward_weights).nansum(dim=1)
        return totals.masked_fill(rewards.isnan().all(dim=1), math.nan)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.state.global_step == 0:
            self._check_prompt_tokens(inputs, scored)
        rank = self.accelerator.process_index
        rows = self._rows(scored["advantages"].tolist())
        self.records.write_rollouts(self.state.global_step + 1, rank, rows)
        start = time.perf_counter()
        figures = self._over_processes(sampling_figures(scored))
        for name, value in figures.items():
            self._add(name, value)
        self.oversight.check_batch(self, scored, figures)
        self._guard_seconds = time.perf_counter() - start
        return scored

    def _over_processes(self, figures: dict[str, float]) -> dict[str, float]:
        """Each figure's mean over the processes, the largest for a maximum."""
        if not figures:
            return {}
        mine = torch.tensor([list(figures.values())], device=self.accelerator.device)
        every = self.accelerator.gather(mine)
        means, largest = every.mean(dim=0).tolist(), every.amax(dim=0).tolist()
        return {
            name: largest[i] if name.endswith("_max") else means[i]
            for i, name in enumerate(figures)
        }

    def _check_prompt_tokens(self, inputs: list[dict[str, Any]], scored: dict[str, Any]) -> None:
        """The tokens that are trained on are those of the prompt, once, with nothing added."""
        for row, ids, mask in zip(inputs, scored["prompt_ids"], scored["prompt_mask"], strict=True):
            assert ids[mask.bool()].tolist() == self.prompts.ids[row["prompt"]], row["question_id"]

    def _rows(self, advantages: list[float]) -> list[dict[str, Any]]:
        """Rows of the `rollouts` table."""
        assert self.rollout is not None
        found = self.rollout
        first = self.accelerator.process_index * len(found.inputs)
        totals = self._totals(found.rewards).tolist()
        return [
            {
                "step": self.state.global_step + 1,
                "question_id": row["question_id"],
                "sample_index": (first + i) % self.num_generations,
                "prompt": row["prompt"],
                "completion": found.completions[i],
                "num_tokens": len(found.completion_ids[i]),
                "finish_reason": "length" if self._truncated(found.completion_ids[i]) else "stop",
                "status": found.verdicts[i].status.value,
                "strict": found.verdicts[i].strict,
                "lenient": found.verdicts[i].lenient,
                "reward": _finite(totals[i]),
                "advantage": advantages[i],
                "policy_version": self.state.global_step,
                **{
                    f"reward_{name}": _finite(value)
                    for name, value in zip(
                        self.reward_func_names, found.rewards[i].tolist(), strict=True
                    )
                },
            }
            for i, row in enumerate(found.inputs)
        ]

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
            self.oversight.check_step(self, surprise)
            self._add("guard_seconds", self._guard_seconds + time.perf_counter() - start)
            self._guard_seconds = 0.0
        return loss

    def _take_surprise(self) -> tuple[float, float] | None:
        """The surprise of the step, logged; None in a second pass over a batch."""
        if self.sampled_at != self.state.global_step:
            return None
        mean, error = self.surprise.take()
        figures = self._over_processes({"surprise_mean": mean, "surprise_se": error})
        for name, value in figures.items():
            self._add(name, value)
        return figures["surprise_mean"], figures["surprise_se"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with our figures added and the row of the step kept.

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
        if lengths := self._metrics["train"].get("mean_tokens"):
            sampled = lengths[-1] * self.args.generation_batch_size
            self._add("tokens_per_second", sampled / seconds)
        super().log(logs, start_time)
        if self.accelerator.is_main_process:
            row: Logged = {"step": step, **{n: _finite(value) for n, value in logs.items()}}
            self.records.write_metrics(step, row)
            self.on_step(step, row)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
