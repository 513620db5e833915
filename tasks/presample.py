"""Stage 'presample': k completions of every training question.

Nothing is scored here: another verifier or reward reads the same completions again. The work is
done in shards (`tasks.shards`), so a killed run goes on where it was and a larger k draws only
what is missing. Writes table 'completions'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.config import ModelConfig, PresampleConfig, PromptConfig, SamplerConfig, WorkersConfig
from ratchet.errors import UserError
from tasks.context import StageContext, StageResult
from tasks.sampling import Sampled, sample_shards
from tasks.shards import SampleRequest

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
    rows = ctx.inputs["questions"].table("questions").to_pylist()
    questions = [row for row in rows if row["role"] == "train"]
    if not questions:
        raise UserError("no training questions are left to sample: widen questions.train")
    request = SampleRequest(
        questions=questions,
        prompt_format=prompt.format,
        num_samples=presample.k,
        block=presample.k_block,
        temperature=presample.temperature,
        shard_questions=presample.shard_questions,
    )
    (sampled,) = sample_shards(ctx, [request], model_config=model, sampler=sampler, workers=workers)
    ctx.write_table("completions", sampled.table)
    summary = {"num_questions": len(questions), "k": presample.k} | figures(sampled)
    return StageResult(
        summary=summary,
        markdown=_markdown(summary),
        sampled_tokens=sampled.new_tokens,
        device_seconds=sampled.generate_seconds,
    )


def figures(sampled: Sampled) -> dict[str, Any]:
    """Counts, rate and lengths of what was sampled; the rate is None if all was reused."""
    seconds = sampled.generate_seconds
    return {
        "num_completions": sampled.table.num_rows,
        "num_tokens": sum(sampled.table.column("num_tokens").to_pylist()),
        "new_tokens": sampled.new_tokens,
        "generate_seconds": round(seconds, 3),
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
    lines = [
        f"**{summary['num_completions']:,} completions** of {summary['num_questions']:,} questions "
        f"({summary['num_tokens']:,} tokens; {summary['new_tokens']:,} generated now{speed}), "
        f"{summary['truncated_share']:.1%} cut off.",
        "",
        f"Shards: {summary['num_shards']}, of which {summary['num_shards_reused']} were reused.",
        "",
        "| " + " | ".join(["length", *quantiles]) + " |",
        "|---" * (1 + len(quantiles)) + "|",
        "| tokens | " + " | ".join(f"{value:,.0f}" for value in quantiles.values()) + " |",
    ]
    return "\n".join(lines)
