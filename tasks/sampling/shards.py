"""What a shard of completions is, how it is named, found and made.

A shard is a chunk of questions times a block of sample indices, an artifact of its own under the
stage name `samples`. Its key holds what its tokens depend on and nothing else: the model, the
prompts as the model sees them, the block, the decoding, the engine and the seed. So a killed run
goes on at the first missing shard, more samples per question draw only the new blocks, more
questions only the new chunks, and two stages that want the same completions share them. Greedy
shards don't depend on the seed. Who makes the shards of a stage, and where, is said in
`tasks.sampling.sample`, whose code is in no shard's key.

Limits on memory (`gpu_memory_utilization`, the context the engine is opened with) are not in the
key: they decide when a sequence is generated, not which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.config.run import ModelConfig, PromptFormat, SamplerConfig
from ratchet.prompts import fingerprint, prompt_ids
from ratchet.store.code import code_version
from ratchet.store.keys import artifact_key, canonical_json, text_hash
from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Artifact
from tasks.runtime.context import StageContext, StageResult
from tasks.runtime.manifests import manifest_of
from tasks.sampling.engines import PLAIN, OnProgress, Sample, Sampler, Shaping

STAGE = "samples"


@dataclass(frozen=True)
class SampleRequest:
    """Completions wanted: `num_samples` of each question."""

    questions: Sequence[Mapping[str, Any]]
    """Rows with `question_id` and `question`."""
    prompt_format: PromptFormat
    num_samples: int
    block: int
    """Samples of one question in a shard; divides `num_samples`."""
    temperature: float
    """0 is greedy decoding."""
    shard_questions: int
    """Questions in a shard, but for the last."""
    shaping: Shaping = PLAIN
    """What else reshapes the distribution."""
    enable_thinking: bool | None = None
    """As `model.enable_thinking` when left out."""
    first_sample: int = 0
    """Index of the first sample: draws from one index on have nothing to do with those before."""


@dataclass(frozen=True)
class Shard:
    """A chunk of questions and a block of samples."""

    question_ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, by question."""
    prompt_format: PromptFormat
    first_sample: int
    num_samples: int
    temperature: float
    shaping: Shaping = PLAIN

    @property
    def num_completions(self) -> int:
        return len(self.prompts) * self.num_samples

    @property
    def prompts_hash(self) -> str:
        """Hash over question ids and prompts."""
        return text_hash(canonical_json([self.question_ids, self.prompts]))


def plan_shards(request: SampleRequest, prompts: Sequence[tuple[int, ...]]) -> list[Shard]:
    """The shards of a request, chunk by chunk; `prompts` by question."""
    assert request.num_samples % request.block == 0, "whole blocks only"
    ids = tuple(row["question_id"] for row in request.questions)
    return [
        Shard(
            question_ids=ids[start : start + request.shard_questions],
            prompts=tuple(prompts[start : start + request.shard_questions]),
            prompt_format=request.prompt_format,
            first_sample=first,
            num_samples=request.block,
            temperature=request.temperature,
            shaping=request.shaping,
        )
        for start in range(0, len(ids), request.shard_questions)
        for first in range(
            request.first_sample, request.first_sample + request.num_samples, request.block
        )
    ]


@dataclass(frozen=True)
class Made:
    """What it took to make a shard; nothing where another process made it."""

    seconds: float = 0.0
    """Time that the engine spent on it."""
    num_tokens: int = 0


class ShardStore:
    """Finds and makes the shards of one model in one stage."""

    def __init__(
        self, ctx: StageContext, model_config: ModelConfig, sampler: SamplerConfig
    ) -> None:
        self.ctx = ctx
        self.model: Artifact = ctx.inputs["model"]
        self.sampler = sampler
        self.code = code_version("tasks.sampling.shards")
        self.settings = {
            "engine": sampler.engine,
            "dtype": model_config.dtype,
            "max_num_seqs": sampler.max_num_seqs,
            "max_completion_tokens": sampler.max_completion_tokens,
        }

    def seed_of(self, shard: Shard) -> int:
        """Seed of the run as far as the shard depends on it."""
        return 0 if shard.temperature == 0 else self.ctx.seed

    def call_seed(self, shard: Shard) -> int:
        """Seed of the call that generates the shard: its own, and the same for every model and
        engine, so that variants are compared on the same draws."""
        parts = [self.seed_of(shard), shard.prompts_hash, shard.first_sample]
        return int(text_hash(canonical_json(parts))[:12], 16)

    def config_of(self, shard: Shard) -> dict[str, Any]:
        """What is in the shard's key beside the prompts."""
        shaping = {} if shard.shaping == PLAIN else asdict(shard.shaping)
        return self.settings | {
            "prompt_format": shard.prompt_format.value,
            "first_sample": shard.first_sample,
            "num_samples": shard.num_samples,
            "temperature": shard.temperature,
            **shaping,
        }

    def prints_of(self, shard: Shard) -> dict[str, str]:
        """Hashes of the prompts."""
        return {"prompts": shard.prompts_hash, "format": fingerprint(shard.prompt_format)}

    def key_of(self, shard: Shard) -> str:
        """The shard's key."""
        return artifact_key(
            STAGE,
            self.config_of(shard),
            self.prints_of(shard),
            {"model": self.model.manifest.key},
            self.code,
            self.seed_of(shard),
        )

    def find(self, key: str) -> Artifact | None:
        """The shard if it is there and sound, and truly the one of this key: a folder that was
        put in its place (another model's, say) is not."""
        found = self.ctx.store.reusable(STAGE, key, self.ctx.log)
        if found is not None and found.manifest.key != key:
            self.ctx.log(
                f"{found.folder} holds another shard ({found.manifest.key}): it is made again"
            )
            return None
        return found

    def draw(
        self, shard: Shard, engine: Sampler, on_progress: OnProgress | None = None
    ) -> list[list[Sample]]:
        """The shard's completions by question: one call of the engine, always the same."""
        return engine.generate(
            shard.prompts,
            n=shard.num_samples,
            temperature=shard.temperature,
            max_tokens=self.sampler.max_completion_tokens,
            seed=self.call_seed(shard),
            shaping=shard.shaping,
            on_progress=on_progress,
        )

    def make(
        self, shard: Shard, key: str, engine: Callable[[], Sampler], on_progress: OnProgress
    ) -> Made:
        """Draw and store the shard, unless another process has meanwhile."""
        with self.ctx.store.lock(STAGE, key, self.ctx.log):
            if self.find(key) is not None:
                return Made()
            generator = engine()
            on_progress(0, 0)
            started_at, started = time.time(), time.monotonic()
            samples = self.draw(shard, generator, on_progress)
            seconds = time.monotonic() - started
            num_tokens = self._commit(shard, key, samples, started_at, seconds)
        return Made(seconds, num_tokens)

    def _commit(
        self,
        shard: Shard,
        key: str,
        samples: list[list[Sample]],
        started_at: float,
        seconds: float,
    ) -> int:
        """Store the shard; its tokens."""
        table = to_table("completions", list(self._rows(shard, samples)))
        num_tokens = sum(len(sample.token_ids) for group in samples for sample in group)
        summary = {
            "num_questions": len(shard.prompts),
            "num_completions": shard.num_completions,
            "num_tokens": num_tokens,
        }
        with self.ctx.store.build(STAGE, key) as build:
            write_table(build.out_dir / "completions.parquet", "completions", table)
            manifest = manifest_of(
                build.out_dir,
                stage=STAGE,
                node=self.ctx.node,
                key=key,
                run_id=self.ctx.run_id,
                config=self.config_of(shard),
                fingerprints=self.prints_of(shard),
                inputs={"model": self.model},
                code_version=self.code,
                seed=self.seed_of(shard),
                started_at=started_at,
                result=StageResult(summary, sampled_tokens=num_tokens, device_seconds=seconds),
            )
            self.ctx.store.commit(build, manifest)
        return num_tokens

    def _rows(self, shard: Shard, samples: list[list[Sample]]) -> Iterator[dict[str, Any]]:
        """Rows of table 'completions'."""
        seed = self.call_seed(shard)
        for question_id, group in zip(shard.question_ids, samples, strict=True):
            for index, sample in enumerate(group, start=shard.first_sample):
                yield {
                    "question_id": question_id,
                    "sample_index": index,
                    "prompt_format": shard.prompt_format.value,
                    "text": sample.text,
                    "token_ids": sample.token_ids,
                    "num_tokens": len(sample.token_ids),
                    "finish_reason": sample.finish_reason,
                    "temperature": shard.temperature,
                    **asdict(shard.shaping),
                    "max_tokens": self.sampler.max_completion_tokens,
                    "seed": seed,
                    "model_key": self.model.manifest.key,
                }


def render(
    tokenizer: Any, request: SampleRequest, *, enable_thinking: bool
) -> list[tuple[int, ...]]:
    """The prompt of each question as token ids; `enable_thinking` is used where the request
    doesn't say."""
    wanted = request.enable_thinking
    thinking = enable_thinking if wanted is None else wanted
    return [
        tuple(
            prompt_ids(tokenizer, request.prompt_format, row["question"], enable_thinking=thinking)
        )
        for row in request.questions
    ]
