"""TRL's `DistillationTrainer` with our prompts, seeds, sampler and guard.

What is added, and why a subclass is needed for it:

* Prompts go in as token ids, rendered as every other stage renders them.
* Every batch is sampled under a seed made of the run's seed and the step, so a resumed run repeats
  what it would have done.
* Where the run samples with vLLM, the student's weights reach an engine in this process the way
  GRPO's do (`tasks.sync`): as an adapter version, or all of them for full fine-tuning. TRL's own
  way merges the adapter into the student and back at every step, which rounds, and leaves the
  number format to vLLM.
* The loss takes the teacher's whole distribution at every sampled position, so it needs no
  log-probabilities of the sampler, and TRL asks for none. They are asked for here: on some
  completions of every step they are compared with the student's own, and a sampler that is no
  longer the student stops the stage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trl import DistillationTrainer

from ratchet.config.run import LoraConfig, SamplerConfig
from ratchet.diagnostics.drift import ROUNDING, DriftError
from ratchet.errors import UserError
from tasks.training.seeds import step_seed
from tasks.warmstart.nan_guard import EXAMPLE, Guarded, NanGuard

NUM_DRIFT_COMPLETIONS = 4
"""Completions of a step whose log-probabilities are compared; each costs a forward pass of the
student over one text."""
HALT_DRIFT = 5.0
"""The stage stops at this many times the drift that rounding explains at most."""


class GuardedDistillationTrainer(Guarded, DistillationTrainer):
    """`DistillationTrainer` on token-id prompts, under a `NanGuard`. `dtype` is the sampler's."""

    def __init__(self, guard: NanGuard, dtype: str, **kwargs: Any) -> None:
        self.guard = guard
        self.dtype = dtype
        super().__init__(**kwargs)
        if self.use_vllm:
            self.vllm_generation.logprobs = 0  # those of the sampled tokens

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict]:
        return prompts, None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        step = self.state.global_step
        torch.manual_seed(step_seed(self.args.seed, step, self.accelerator.process_index))
        if not self.use_vllm:
            found: list[list[int]] = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return found
        record = self.vllm_generation.sync_as(step, None)
        start = time.perf_counter()
        _, completions, logprobs, _ = self.vllm_generation.generate(
            prompts=prompt_ids, images=None, num_generations=1
        )
        self._metrics["train"]["generate_seconds"].append(time.perf_counter() - start)
        self._metrics["train"]["sync_seconds"].append(record.seconds)
        self._check_drift(prompt_ids, completions, logprobs)
        return [list(ids) for ids in completions]

    def _check_drift(
        self,
        prompts: list[list[int]],
        completions: list[list[int]],
        logprobs: list[list[list[float]]],
    ) -> None:
        """Log how far the sampler's log-probabilities are from the student's; DriftError when
        rounding can't explain it."""
        from tasks.audit.logprobs import as_lists, gap, padded, plain_scores
        from tasks.sync.types import Sampled

        count = NUM_DRIFT_COMPLETIONS
        sampled = [
            Sampled(prompt, list(ids), [one[0] for one in values], None)
            for prompt, ids, values in zip(
                prompts[:count], completions[:count], logprobs[:count], strict=True
            )
        ]
        ids, mask, width = padded(sampled)
        with torch.no_grad(), self.accelerator.autocast():
            own, _ = plain_scores(self.model, ids, mask, width, self.temperature, batch_size=1)
        drift = gap([one.logprobs for one in sampled], as_lists(own, sampled))
        self._metrics["train"]["drift_mean"].append(drift.mean)
        self._metrics["train"]["drift_max"].append(drift.max)
        limit = HALT_DRIFT * ROUNDING[self.dtype][1]
        if not drift.mean <= limit:
            raise DriftError(
                f"step {self.state.global_step + 1} of OPD: vLLM and the student differ by "
                f"{drift.mean:.1e} nats per token on the same completions (at most {limit:.0e} in "
                f"{self.dtype}): vLLM does not sample from the student's weights. Set "
                "sampler.engine = 'transformers', and see `ratchet audit-sync`"
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output[EXAMPLE] = torch.tensor([row[EXAMPLE] for row in inputs])
        return output

    def close(self) -> None:
        """Free the engine, if there is one."""
        if self.use_vllm:
            self.vllm_generation.close()


def drift_summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures for the stage's summary; none where the student itself sampled."""
    means = [row["drift_mean"] for row in rows if "drift_mean" in row]
    if not means:
        return {}
    largest = max(row["drift_max"] for row in rows if "drift_max" in row)
    return {"drift_mean": sum(means) / len(means), "drift_max": largest}


def describe_drift(found: Mapping[str, float]) -> str:
    """The same for people."""
    if not found:
        return "The student's own weights did the sampling: there is no drift."
    return (
        f"Drift between vLLM and the student: {found['drift_mean']:.1e} nats per token on average, "
        f"{found['drift_max']:.1e} at most."
    )


def check_backend(lora: LoraConfig, sampler: SamplerConfig) -> None:
    """UserError for an adapter that vLLM can't sample, before anything is loaded."""
    if sampler.engine != "vllm" or not lora.enabled:
        return
    from tasks.sync.engine import engine_rank

    try:
        engine_rank(lora.r)
    except UserError as error:
        raise UserError(
            f"opd.lora.r = {lora.r} is more than vLLM can sample: lower it, or set "
            "sampler.engine = 'transformers'"
        ) from error
