"""Sample questions in shards that are artifacts of their own.

A shard is a chunk of questions times a block of sample indices, stored under the stage name
`samples`. Its key holds what its tokens depend on and nothing else: the model, the prompts as the
model sees them, the block, the decoding, the engine and the seed. So a killed run goes on at the
first missing shard, more samples per question draw only the new blocks, more questions only the
new chunks, and two stages that want the same completions share them. Greedy shards don't depend on
the seed. The engine is opened when the first shard is found missing.

Limits on memory (`gpu_memory_utilization`, the context the engine is opened with) are not in the
key: they decide when a sequence is generated, not which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.config import ModelConfig, PromptFormat, SamplerConfig
from ratchet.prompts import fingerprint, prompt_ids
from ratchet.schemas import schema, to_table, write_table
from ratchet.store.code import code_version
from ratchet.store.keys import artifact_key, canonical_json, text_hash
from ratchet.store.store import Artifact
from tasks.context import StageContext
from tasks.manifests import manifest_of
from tasks.models import load_tokenizer
from tasks.sampler import Sample, Sampler, open_sampler
from tasks.sampling_progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

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


@dataclass(frozen=True)
class Sampled:
    """What a request came to."""

    table: pa.Table
    """Table 'completions', by question in the order given, then by sample index."""
    num_shards: int
    num_reused: int
    new_tokens: int
    """Tokens of the shards made now."""
    generate_seconds: float
    """Time spent generating, without opening the engine, in the shards made now."""


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
        )
        for start in range(0, len(ids), request.shard_questions)
        for first in range(0, request.num_samples, request.block)
    ]


class ShardStore:
    """Finds and makes the shards of one model in one stage."""

    def __init__(
        self, ctx: StageContext, model_config: ModelConfig, sampler: SamplerConfig
    ) -> None:
        self.ctx = ctx
        self.model: Artifact = ctx.inputs["model"]
        self.sampler = sampler
        self.code = code_version("tasks.shards")
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
        engine, so that arms are compared on the same draws."""
        parts = [self.seed_of(shard), shard.prompts_hash, shard.first_sample]
        return int(text_hash(canonical_json(parts))[:12], 16)

    def config_of(self, shard: Shard) -> dict[str, Any]:
        """What is in the shard's key beside the prompts."""
        return self.settings | {
            "prompt_format": shard.prompt_format.value,
            "first_sample": shard.first_sample,
            "num_samples": shard.num_samples,
            "temperature": shard.temperature,
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
        """The shard if it is there and sound."""
        return self.ctx.store.reusable(STAGE, key, self.ctx.log)

    def make(
        self, shard: Shard, key: str, engine: Callable[[], Sampler], progress: Progress
    ) -> tuple[Artifact, float]:
        """Generate the shard, unless another process has meanwhile: (shard, seconds spent)."""
        with self.ctx.store.lock(STAGE, key, self.ctx.log):
            found = self.find(key)
            if found is not None:
                progress.add(shard.num_completions, 0, 0.0)
                return found, 0.0
            generator = engine()
            started_at, started = time.time(), time.monotonic()
            seed = self.call_seed(shard)
            samples = generator.generate(
                shard.prompts,
                n=shard.num_samples,
                temperature=shard.temperature,
                max_tokens=self.sampler.max_completion_tokens,
                seed=seed,
                on_progress=progress.watch(),
            )
            seconds = time.monotonic() - started
            made = self._commit(shard, key, samples, seed, started_at, seconds)
        progress.add(shard.num_completions, made.manifest.sampled_tokens, seconds)
        return made, seconds

    def _commit(
        self,
        shard: Shard,
        key: str,
        samples: list[list[Sample]],
        seed: int,
        started_at: float,
        seconds: float,
    ) -> Artifact:
        table = to_table("completions", list(self._rows(shard, samples, seed)))
        num_tokens = sum(len(sample.token_ids) for group in samples for sample in group)
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
                summary={
                    "num_questions": len(shard.prompts),
                    "num_completions": shard.num_completions,
                    "num_tokens": num_tokens,
                },
                sampled_tokens=num_tokens,
                device_seconds=seconds,
            )
            return self.ctx.store.commit(build, manifest)

    def _rows(
        self, shard: Shard, samples: list[list[Sample]], seed: int
    ) -> Iterator[dict[str, Any]]:
        """Rows of table 'completions'."""
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
                    "top_p": 1.0,
                    "max_tokens": self.sampler.max_completion_tokens,
                    "seed": seed,
                    "model_key": self.model.manifest.key,
                }


def render(
    tokenizer: Any, request: SampleRequest, *, enable_thinking: bool
) -> list[tuple[int, ...]]:
    """The prompt of each question as token ids."""
    return [
        tuple(
            prompt_ids(
                tokenizer, request.prompt_format, row["question"], enable_thinking=enable_thinking
            )
        )
        for row in request.questions
    ]


def in_order(parts: list[pa.Table], request: SampleRequest) -> pa.Table:
    """One table, by question in the order of the request, then by sample index."""
    import pyarrow as pa

    if not parts:
        return schema("completions").empty_table()
    table = pa.concat_tables(parts)
    place = {row["question_id"]: index for index, row in enumerate(request.questions)}
    order = pa.array([place[name] for name in table.column("question_id").to_pylist()], pa.int64())
    return (
        table.append_column("order", order)
        .sort_by([("order", "ascending"), ("sample_index", "ascending")])
        .drop_columns(["order"])
    )


def sample_shards(
    ctx: StageContext,
    requests: Sequence[SampleRequest],
    *,
    model_config: ModelConfig,
    sampler: SamplerConfig,
) -> list[Sampled]:
    """Completions of `ctx.inputs['model']` for each request, in order; one engine serves all.

    UserError when a prompt and its completion exceed the model's context.
    """
    shards = ShardStore(ctx, model_config, sampler)
    tokenizer = load_tokenizer(shards.model)
    plans: list[list[tuple[Shard, str]]] = []
    for request in requests:
        prompts = render(tokenizer, request, enable_thinking=model_config.enable_thinking)
        plans.append([(shard, shards.key_of(shard)) for shard in plan_shards(request, prompts)])
    wanted = {key: shard for plan in plans for shard, key in plan}
    there = {key: found for key in wanted if (found := shards.find(key)) is not None}
    _announce(ctx, wanted, there)
    longest = max((len(prompt) for shard in wanted.values() for prompt in shard.prompts), default=0)
    seconds: dict[str, float] = {}
    progress = Progress(
        ctx,
        sum(shard.num_completions for shard in wanted.values()),
        sum(wanted[key].num_completions for key in there),
    )
    with ExitStack() as stack:
        opened: list[Sampler] = []

        def engine() -> Sampler:
            if not opened:
                ctx.log(f"loading the model into {sampler.engine}")
                opened.append(
                    stack.enter_context(
                        open_sampler(
                            shards.model,
                            model_config=model_config,
                            sampler=sampler,
                            max_prompt_tokens=longest,
                        )
                    )
                )
            return opened[0]

        made = dict(there)
        for key, shard in wanted.items():
            if key not in made:
                made[key], seconds[key] = shards.make(shard, key, engine, progress)
    return [
        _collect(request, [key for _, key in plan], made, seconds)
        for request, plan in zip(requests, plans, strict=True)
    ]


def _announce(
    ctx: StageContext, wanted: Mapping[str, Shard], there: Mapping[str, Artifact]
) -> None:
    if there:
        ctx.log(f"{len(there)} of {len(wanted)} shards exist already and are reused")


def _collect(
    request: SampleRequest,
    keys: list[str],
    made: Mapping[str, Artifact],
    seconds: Mapping[str, float],
) -> Sampled:
    """The answer to one request; `seconds` has the shards that were generated now."""
    new = [key for key in keys if seconds.get(key, 0.0) > 0]
    return Sampled(
        table=in_order([made[key].table("completions") for key in keys], request),
        num_shards=len(keys),
        num_reused=len(keys) - len(new),
        new_tokens=sum(made[key].manifest.sampled_tokens for key in new),
        generate_seconds=sum(seconds[key] for key in new),
    )
