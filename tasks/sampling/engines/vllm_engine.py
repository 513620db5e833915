"""Offline vLLM, on GPUs and CPUs by the same path.

Every argument that could change a result is given: the number format (vLLM picks bfloat16 for a
float32 checkpoint), no sampling defaults out of the checkpoint's generation config, a fixed token
budget per step. The prefix cache is emptied before each call.

Seeds: on a GPU every request has its own. Seeded requests can crash the CPU backend, so there the
engine runs inside this process and torch's global generator is seeded before each call; requests
are scheduled in the same order then, so the draws repeat too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from tasks.runtime.worker import set_environment
from tasks.sampling.engines.base import (
    PLAIN,
    EngineSpec,
    OnProgress,
    Sample,
    Shaping,
    as_samples,
    check_lengths,
)

set_environment()  # vLLM reads its settings when it is imported

import torch  # noqa: E402
from transformers import AutoConfig, PretrainedConfig  # noqa: E402
from vllm import LLM, RequestOutput, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

GIB = 2**30
MAX_CPU_CACHE_SHARE = 0.125
TOKENS_PER_STEP_CPU = 4096
TOKENS_PER_STEP_GPU = 8192


def cache_gib(config: PretrainedConfig, spec: EngineSpec, memory_bytes: int) -> int:
    """Key-value cache on a CPU, in whole GiB as vLLM takes it: room for all sequences at full
    length, but no more than an eighth of the memory and at least one. `config` is the language
    model's."""
    facts = config.to_dict()  # not every architecture sets these two
    heads = facts.get("num_key_value_heads") or config.num_attention_heads
    head_dim = facts.get("head_dim") or config.hidden_size // config.num_attention_heads
    number_bytes = 4 if spec.dtype == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * heads * head_dim * number_bytes
    need = spec.max_num_seqs * spec.max_model_len * token_bytes
    return max(1, min(-(-need // GIB), int(memory_bytes * MAX_CPU_CACHE_SHARE) // GIB))


def cache_environment(config: PretrainedConfig, spec: EngineSpec) -> dict[str, str]:
    """Where vLLM reads the size of its key-value cache from; nothing on a GPU."""
    if not current_platform.is_cpu():
        return {}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib(config, spec, memory))}


def close_engine(llm: LLM) -> None:
    """Stop an engine in this process and free what it holds; another one can be made afterwards."""
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def request_seed(seed: int, index: int) -> int:
    """Seed of a call's request `index`: far from every other's, because vLLM numbers the
    completions of one request upwards from it."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest)


class VllmSampler:
    """A `Sampler` on vLLM."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.on_cpu = current_platform.is_cpu()
        if self.on_cpu:
            config = AutoConfig.from_pretrained(
                spec.location.path, revision=spec.location.revision, trust_remote_code=False
            ).get_text_config()
            os.environ |= cache_environment(config, spec)
        per_step = TOKENS_PER_STEP_CPU if self.on_cpu else TOKENS_PER_STEP_GPU
        self.llm = LLM(
            spec.location.path,
            revision=spec.location.revision,
            tokenizer_revision=spec.location.revision,
            trust_remote_code=False,
            dtype=spec.dtype,
            seed=0,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=max(per_step, spec.max_num_seqs),
            gpu_memory_utilization=spec.gpu_memory_utilization,
            enforce_eager=self.on_cpu,
            enable_prefix_caching=True,
            generation_config="vllm",
            disable_log_stats=True,
        )

    def _params(self, shaping: Shaping = PLAIN, **given: Any) -> SamplingParams:
        """Sampling parameters; nothing but `shaping` touches the distribution."""
        return SamplingParams(
            top_p=shaping.top_p,
            top_k=shaping.top_k,
            min_p=shaping.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=shaping.repetition_penalty,
            detokenize=False,
            stop_token_ids=list(self.spec.stop_ids),
            **given,
        )

    def _fresh(self) -> None:
        """Empty the prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache between two calls")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        shaping: Shaping = PLAIN,
        on_progress: OnProgress | None = None,
    ) -> list[list[Sample]]:
        """See `Sampler.generate`."""
        check_lengths(prompts, max_tokens, self.spec.max_model_len)
        if temperature == 0 and n > 1:  # vLLM refuses several greedy completions
            once = self.generate(
                prompts,
                n=1,
                temperature=0,
                max_tokens=max_tokens,
                seed=seed,
                shaping=shaping,
                on_progress=on_progress,
            )
            return [samples * n for samples in once]
        self._fresh()
        seeded = temperature > 0 and not self.on_cpu
        params = [
            self._params(
                shaping,
                n=n,
                temperature=temperature,
                max_tokens=max_tokens,
                seed=request_seed(seed, index) if seeded else None,
            )
            for index in range(len(prompts))
        ]
        torch.manual_seed(seed)
        outputs = self._run(prompts, params, on_progress)
        flat = [list(one.token_ids) for output in outputs for one in output.outputs]
        samples = as_samples(self.spec, flat)
        return [samples[start : start + n] for start in range(0, len(samples), n)]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: list[SamplingParams],
        on_progress: OnProgress | None,
    ) -> list[RequestOutput]:
        """Drive the engine until all requests are answered; answers in the order of prompts."""
        self.llm.enqueue(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        done: list[RequestOutput] = []
        num_done = num_tokens = 0
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                done.append(output)
                num_done += len(output.outputs)
                num_tokens += sum(len(one.token_ids) for one in output.outputs)
                if on_progress is not None:
                    on_progress(num_done, num_tokens)
        assert len(done) == len(prompts)
        return sorted(done, key=lambda output: int(output.request_id))  # numbered as enqueued

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """See `Sampler.logprobs`."""
        check_lengths([[*prompt_ids, *completion_ids]], 1, self.spec.max_model_len)
        self._fresh()
        params = self._params(n=1, temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (output,) = self._run([[*prompt_ids, *completion_ids]], [params], None)
        assert output.prompt_logprobs is not None
        positions = output.prompt_logprobs[len(prompt_ids) :]
        found = []
        for token, entries in zip(completion_ids, positions, strict=True):
            assert entries is not None
            found.append(float(entries[token].logprob))
        return found

    def close(self) -> None:
        """Stop the engine and free its memory."""
        close_engine(self.llm)
        del self.llm
