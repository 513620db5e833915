"""Bring about the completions that a stage asks for: find its shards, make the missing ones.

Shards are made in this process, in several processes of this machine, or by Ray actors
(`tasks.sampling.workers`, `tasks.sampling.ray_workers`): `[workers]` says where, and it changes no
result. A shard is one call of the engine, whoever makes it, in whatever order. So engines aren't
kept fed across shards, which `docs/presample.md` gives the price of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.config.run import ModelConfig, SamplerConfig, WorkersConfig
from ratchet.store.schemas import schema
from ratchet.store.store import Artifact
from tasks.models.checkpoints import load_tokenizer
from tasks.runtime.context import StageContext
from tasks.sampling.progress import Progress
from tasks.sampling.shards import STAGE, Made, SampleRequest, Shard, ShardStore, plan_shards, render
from tasks.sampling.workers import Todo, Work, make_here, make_in_processes, num_processes

if TYPE_CHECKING:
    import pyarrow as pa


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
    """Time that engines spent generating the shards made now, summed over workers; opening them
    isn't counted."""
    wall_seconds: float
    """From the moment the first engine began to the last shard of the whole call; 0 if all was
    reused."""


def sample_shards(
    ctx: StageContext,
    requests: Sequence[SampleRequest],
    *,
    model_config: ModelConfig,
    sampler: SamplerConfig,
    workers: WorkersConfig,
) -> list[Sampled]:
    """Completions of `ctx.inputs['model']` for each request, in order.

    UserError when a prompt and its completion exceed the model's context, or for workers that
    can't be had; RuntimeError when workers end before the work does.
    """
    shards = ShardStore(ctx, model_config, sampler)
    tokenizer = load_tokenizer(shards.model)
    plans: list[list[tuple[Shard, str]]] = []
    for request in requests:
        prompts = render(tokenizer, request, enable_thinking=model_config.enable_thinking)
        plans.append([(shard, shards.key_of(shard)) for shard in plan_shards(request, prompts)])
    wanted = {key: shard for plan in plans for shard, key in plan}
    there = {key: found for key in wanted if (found := shards.find(key)) is not None}
    if there:
        ctx.log(f"{len(there)} of {len(wanted)} shards exist already and are reused")
    missing = {key: shard for key, shard in wanted.items() if key not in there}
    new: dict[str, Made] = {}
    wall_seconds = 0.0
    if missing:
        progress = Progress(
            ctx,
            sum(shard.num_completions for shard in wanted.values()),
            sum(wanted[key].num_completions for key in there),
        )
        longest = max(len(prompt) for shard in wanted.values() for prompt in shard.prompts)
        new = _make(Work(ctx, model_config, sampler, longest), missing, workers, progress)
        wall_seconds = progress.seconds()
    made = there | {key: ctx.store.get(STAGE, key) for key in missing}
    return [
        _collect(request, [key for _, key in plan], made, new, wall_seconds)
        for request, plan in zip(requests, plans, strict=True)
    ]


def _make(work: Work, missing: Todo, workers: WorkersConfig, progress: Progress) -> dict[str, Made]:
    """Make the missing shards where `workers` says."""
    if workers.ray is not None:
        from tasks.sampling.ray_workers import make_on_ray

        return make_on_ray(work, missing, progress, workers)
    count = num_processes(workers, len(missing))
    if count == 1:
        return make_here(work, missing, progress)
    return make_in_processes(work, missing, progress, count)


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


def _collect(
    request: SampleRequest,
    keys: list[str],
    made: Mapping[str, Artifact],
    new: Mapping[str, Made],
    wall_seconds: float,
) -> Sampled:
    """The answer to one request; `new` has the shards that were made for it."""
    own = [new[key] for key in keys if key in new and new[key].num_tokens]
    return Sampled(
        table=in_order([made[key].table("completions") for key in keys], request),
        num_shards=len(keys),
        num_reused=len(keys) - len(own),
        new_tokens=sum(one.num_tokens for one in own),
        generate_seconds=sum(one.seconds for one in own),
        wall_seconds=wall_seconds if own else 0.0,
    )
