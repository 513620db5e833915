"""Stage 'presample': k completions of every training question.

Nothing is scored here: another verifier or reward reads the same completions again. The work is
done in shards (`tasks.sampling.shards`), so a killed run goes on where it was and a larger k draws
only what is missing; `docs/presample.md` has the whole of it. Writes table 'completions'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.config.run import (
    ModelConfig,
    PresampleConfig,
    PromptConfig,
    SamplerConfig,
    WorkersConfig,
)
from ratchet.errors import UserError
from ratchet.questions.screen import Reason
from ratchet.store.store import Artifact
from tasks.runtime.context import StageContext, StageResult
from tasks.sampling.sample import Sampled, sample_shards
from tasks.sampling.shards import SampleRequest

if TYPE_CHECKING:
    import pyarrow as pa

QUANTILES = (0.5, 0.9, 0.99, 1.0)


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    workers: WorkersConfig,
    presample: PresampleConfig,
) -> StageResult:
    """Sample the questions of role 'train'. UserError when there are none."""
    request = request_of(ctx.inputs["questions"], prompt, presample)
    if num_too_long := too_long(ctx):
        ctx.log(f"{num_too_long:,} training questions aren't sampled: their prompt is too long")
    (sampled,) = sample_shards(ctx, [request], model_config=model, sampler=sampler, workers=workers)
    ctx.write_table("completions", sampled.table)
    summary = (
        {"num_questions": len(request.questions), "k": presample.k}
        | figures(sampled)
        | {"num_too_long": num_too_long}
    )
    return StageResult(
        summary=summary,
        markdown=_markdown(summary),
        sampled_tokens=sampled.new_tokens,
        device_seconds=sampled.generate_seconds,
    )


def request_of(
    questions: Artifact, prompt: PromptConfig, presample: PresampleConfig
) -> SampleRequest:
    """What the stage samples. UserError when no question has role 'train'."""
    rows = [row for row in questions.table("questions").to_pylist() if row["role"] == "train"]
    if not rows:
        raise UserError("no training questions are left to sample: widen questions.train")
    return SampleRequest(
        questions=rows,
        prompt_format=prompt.format,
        num_samples=presample.k,
        block=presample.k_block,
        temperature=presample.temperature,
        shard_questions=presample.shard_questions,
    )


def too_long(ctx: StageContext) -> int:
    """Training questions that stage 'questions' dropped at the door for a prompt of more than
    `questions.max_prompt_tokens`."""
    parent = ctx.inputs["questions"].manifest.parents.get("questions")
    loaded = None if parent is None else ctx.store.find(parent.stage, parent.key)
    if loaded is None:  # tidied away, or the questions came from elsewhere
        return 0
    number: int = loaded.manifest.summary["dropped"]["train"].get(Reason.PROMPT_TOO_LONG.value, 0)
    return number


def figures(sampled: Sampled) -> dict[str, Any]:
    """Counts, rate and lengths of what was sampled; the rate is None if all was reused."""
    seconds = sampled.wall_seconds
    return {
        "num_completions": sampled.table.num_rows,
        "num_tokens": sum(sampled.table.column("num_tokens").to_pylist()),
        "new_tokens": sampled.new_tokens,
        "generate_seconds": round(sampled.generate_seconds, 3),
        "wall_seconds": round(seconds, 3),
        "tokens_per_second": round(sampled.new_tokens / seconds, 1) if seconds else None,
        "num_shards": sampled.num_shards,
        "num_shards_reused": sampled.num_reused,
        "truncated_share": truncated_share(sampled.table),
        "length_quantiles": length_quantiles(sampled.table),
    }


def truncated_share(completions: pa.Table) -> float:
    """Share of completions that were cut off at the token limit."""
    reasons = completions.column("finish_reason").to_pylist()
    return reasons.count("length") / len(reasons)


def length_quantiles(completions: pa.Table) -> dict[str, float]:
    """Quantiles of the completions' tokens, keyed as 'p50', …, 'max'."""
    import numpy as np

    lengths = completions.column("num_tokens").to_numpy()
    names = ["max" if q == 1.0 else f"p{q * 100:g}" for q in QUANTILES]
    return dict(zip(names, np.quantile(lengths, QUANTILES).tolist(), strict=True))


def _markdown(summary: dict[str, Any]) -> str:
    rate = summary["tokens_per_second"]
    speed = f" at {rate:,.0f} tokens/s" if rate else ""
    quantiles = summary["length_quantiles"]
    long = summary["num_too_long"]
    lines = [
        f"**{summary['num_completions']:,} completions** of {summary['num_questions']:,} questions "
        f"({summary['num_tokens']:,} tokens; {summary['new_tokens']:,} generated now{speed}), "
        f"{summary['truncated_share']:.1%} cut off.",
        "",
        f"Shards: {summary['num_shards']}, of which {summary['num_shards_reused']} were reused. "
        f"Dropped at the door for a prompt over `questions.max_prompt_tokens`: {long:,}.",
        "",
        "| " + " | ".join(["length", *quantiles]) + " |",
        "|---" * (1 + len(quantiles)) + "|",
        "| tokens | " + " | ".join(f"{value:,.0f}" for value in quantiles.values()) + " |",
    ]
    return "\n".join(lines)
