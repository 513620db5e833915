"""TRL's generation backend with an engine in the trainer's process.

`AdapterGeneration` and `MergedGeneration` take the place of `VLLMGeneration`; what they share with
other backends is in `tasks.sync.versioned`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms import current_platform

from tasks.sampling.engines.vllm_engine import close_engine
from tasks.sync.engine import AdapterLLM, engine_arguments, engine_process, worker_of
from tasks.sync.readback import adapter_slot, effective_weights, vocab_rows
from tasks.sync.types import SAMPLING_FIELDS, EngineFacts, Sampled, as_sampled
from tasks.sync.versioned import (
    AdapterSync,
    MergedSync,
    VersionedGeneration,
    replaced,
)


class ColocatedGeneration(VersionedGeneration):
    """The engine is made here, with `EngineSettings`."""

    llm_class: type[LLM] = LLM
    _sampling: dict[str, float | int] | None = None
    """Parameters of the newest request of `sample`."""

    def _init_vllm(self) -> None:
        def build(**given: Any) -> LLM:
            return self.llm_class(**(given | engine_arguments(self.settings)))

        config = self.model.config.get_text_config()
        with (
            engine_process(config, self.settings.spec),
            replaced(vllm_generation, "LLM", build),
        ):
            super()._init_vllm()

    def _sample(self, prompts: list[list[int]], n: int) -> list[Sampled]:
        repeated = [prompt for prompt in prompts for _ in range(n)]
        with self._watched() as outputs:
            answer = self.generate(repeated, None, n)
        return as_sampled(answer, [output.num_cached_tokens for output in outputs])

    @contextmanager
    def _watched(self) -> Iterator[list[RequestOutput]]:
        """The engine's own answers to what is generated inside."""
        outputs: list[RequestOutput] = []
        generate = self.llm.generate

        def watched(*args: Any, sampling_params: SamplingParams, **kwargs: Any) -> Any:
            found = generate(*args, sampling_params=sampling_params, **kwargs)
            outputs.extend(found)
            self._sampling = {name: getattr(sampling_params, name) for name in SAMPLING_FIELDS}
            return found

        self.llm.generate = watched
        try:
            yield outputs
        finally:
            del self.llm.generate

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `VersionedGeneration.score`."""
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        found = []
        # One by one: the CPU backend's LoRA can't give several prompts' log-probs at once.
        for ids in token_ids:
            (answer,) = self.llm.generate(
                [{"prompt_token_ids": list(ids)}], sampling_params=params, use_tqdm=False
            )
            pairs = zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
            found.append([at[token].logprob for at, token in pairs])
        return found

    def effective_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `VersionedGeneration.effective_weights`."""
        worker = worker_of(self.llm)
        version = self.sampled_version()
        slot = None if version is None else adapter_slot(worker, version.adapter_id)
        return effective_weights(worker.get_model(), slot)

    def facts(self) -> EngineFacts:
        """See `VersionedGeneration.facts`."""
        config = self.llm.llm_engine.vllm_config
        runner = worker_of(self.llm).model_runner
        return EngineFacts.of(
            config.model_config,
            config.cache_config,
            config.lora_config,
            mode="colocate",
            logprobs_mode=runner.sampler.logprobs_mode,
            vocab_rows=vocab_rows(runner.get_model()),
            sampling=self._sampling,
        )

    def close(self) -> None:
        """Free the engine."""
        close_engine(self.llm)
        del self.llm


class AdapterGeneration(AdapterSync, ColocatedGeneration):
    """The adapter itself goes to the engine, under a version."""

    llm_class = AdapterLLM


class MergedGeneration(MergedSync, ColocatedGeneration):
    """Every weight goes to the engine, adapters merged in."""

    def _transfer(self) -> int:
        self._num_bytes = 0
        if current_platform.is_cpu():
            self._reload()
        else:
            VLLMGeneration.sync_weights(self)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after a weight sync")
        return self._num_bytes

    def _reload(self) -> None:
        """Load all weights through vLLM's reload.

        The CPU backend keeps linear weights in a packed form only, which a plain load can't reach.
        The head's packed copy isn't renewed where it shares the embedding's weight, so it is
        packed again.
        """
        worker_of(self.llm).reload_weights(weights_iterator=self._iter_named_params())
        head = worker_of(self.llm).get_model().lm_head
        head.quant_method.process_weights_after_loading(head)
