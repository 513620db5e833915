"""Stage 'evaluate': one variant answers the held-out questions.

All variants get the same questions, prompt, decoding, draws and verifier: greedy once, and
`samples` times at `temperature` for pass@k. The starting model is sampled `band_samples` times more
where bands are made of its pass rate (`ratchet.evaluation.bands`). Which variant it is follows from
the node's name ('evaluate.rl'); a variant is any model, the run's own or another that
`evaluate.variants` names. Strict and lenient are both kept, so that a learnt format is never taken
for learnt maths. Writes table 'eval'; the variants are set side by side by stage 'compare'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.config.run import (
    EvaluateConfig,
    ModelConfig,
    PromptConfig,
    SamplerConfig,
    WorkersConfig,
)
from ratchet.errors import UserError
from ratchet.evaluation.bands import BANDING
from ratchet.evaluation.stats import wilson
from ratchet.prompts import STYLE_OF, answer_start, prompt_text
from ratchet.store.code import code_version
from ratchet.store.store import Artifact
from ratchet.verifier import (
    VERIFIER_VERSION,
    Status,
    Style,
    close_shared_pool,
    status_rates,
    verify_batch,
)
from tasks.models.checkpoints import load_tokenizer
from tasks.runtime.context import StageContext, StageResult
from tasks.sampling.sample import Sampled, sample_shards
from tasks.sampling.shards import SampleRequest

GREEDY, SAMPLED = "greedy", "sampled"


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    workers: WorkersConfig,
    evaluate: EvaluateConfig,
) -> StageResult:
    """Answer and verify the questions of role 'test'. UserError when there are none."""
    source = ctx.inputs["questions"]
    questions = [row for row in source.table("questions").to_pylist() if row["role"] == "test"]
    if not questions:
        raise UserError("no test questions are left to evaluate on: widen questions.test")
    prefilled = prefilled_part(ctx.inputs["model"], questions[0]["question"], model, prompt)
    plans = requests_for(questions, prompt, evaluate)
    answers = sample_shards(
        ctx, list(plans.values()), model_config=model, sampler=sampler, workers=workers
    )
    variant = ctx.node.partition(".")[2] or ctx.node
    rows: list[dict[str, Any]] = []
    for decoding, sampled in zip(plans, answers, strict=True):
        style = STYLE_OF[prompt.format]
        rows += judge(questions, sampled, style, prefilled, variant=variant, decoding=decoding)
    close_shared_pool()
    ctx.write_table("eval", rows)
    figures = summarise([row for row in rows if row["decoding"] != BANDING], evaluate.confidence)
    return StageResult(
        summary={
            "variant": variant,
            "num_questions": len(questions),
            "verifier": verifier_version(),
            "benchmarks": figures,
            "num_shards": sum(sampled.num_shards for sampled in answers),
            "num_shards_reused": sum(sampled.num_reused for sampled in answers),
        },
        markdown=_markdown(variant, figures, evaluate),
        sampled_tokens=sum(sampled.new_tokens for sampled in answers),
        device_seconds=sum(sampled.generate_seconds for sampled in answers),
    )


def requests_for(
    questions: Sequence[Mapping[str, Any]], prompt: PromptConfig, evaluate: EvaluateConfig
) -> dict[str, SampleRequest]:
    """What is to be sampled, by decoding. The samples for bands are draws of their own."""

    def ask(num_samples: int, temperature: float, first_sample: int = 0) -> SampleRequest:
        return SampleRequest(
            questions,
            prompt.format,
            num_samples,
            num_samples,
            temperature,
            evaluate.shard_questions,
            first_sample=first_sample,
        )

    plans = {GREEDY: ask(1, 0.0)}
    if evaluate.samples:
        plans[SAMPLED] = ask(evaluate.samples, evaluate.temperature)
    if evaluate.band_samples:
        plans[BANDING] = ask(evaluate.band_samples, evaluate.temperature, evaluate.samples)
    return plans


def prefilled_part(
    artifact: Artifact, question: str, model: ModelConfig, prompt: PromptConfig
) -> str:
    """What this model's chat template writes of the answer itself."""
    text = prompt_text(
        load_tokenizer(artifact), prompt.format, question, enable_thinking=model.enable_thinking
    )
    return answer_start(text)


def verifier_version() -> str:
    """Version of the verifier's rules and of its code: `2-0123abcd`."""
    return f"{VERIFIER_VERSION}-{code_version('ratchet.verifier')[:8]}"


def judge(
    questions: Sequence[Mapping[str, Any]],
    sampled: Sampled,
    style: Style,
    prefilled: str,
    *,
    variant: str,
    decoding: str,
) -> list[dict[str, Any]]:
    """Rows of table 'eval': every completion with its verdict."""
    by_id = {row["question_id"]: row for row in questions}
    completions = sampled.table.to_pylist()
    verdicts = verify_batch(
        [row["text"] for row in completions],
        [by_id[row["question_id"]]["gold"] for row in completions],
        style,
        prefilled=prefilled,
    )
    return [
        {
            "question_id": row["question_id"],
            "benchmark": by_id[row["question_id"]]["source"],
            "variant": variant,
            "decoding": decoding,
            "sample_index": row["sample_index"],
            "band": by_id[row["question_id"]]["band"],
            "text": row["text"],
            "num_tokens": row["num_tokens"],
            "truncated": row["finish_reason"] == "length",
            "status": verdict.status.value,
            "extracted": verdict.extracted,
            "strict": verdict.strict,
            "lenient": verdict.lenient,
        }
        for row, verdict in zip(completions, verdicts, strict=True)
    ]


def summarise(rows: Sequence[Mapping[str, Any]], confidence: float) -> dict[str, Any]:
    """Figures per benchmark and decoding: {benchmark: {decoding: {…}}}.

    Greedy accuracies come with Wilson intervals (`strict_low`, …): one answer per question. Several
    samples of a question aren't independent, so sampled ones get none here.
    """
    groups: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        groups.setdefault(row["benchmark"], {}).setdefault(row["decoding"], []).append(row)
    return {
        benchmark: {
            decoding: _figures(group, confidence if decoding == GREEDY else None)
            for decoding, group in decodings.items()
        }
        for benchmark, decodings in groups.items()
    }


def _figures(rows: Sequence[Mapping[str, Any]], confidence: float | None) -> dict[str, Any]:
    n = len(rows)
    statuses = [row["status"] for row in rows]
    found: dict[str, Any] = {
        "num_completions": n,
        "num_questions": len({row["question_id"] for row in rows}),
        "truncated_share": sum(row["truncated"] for row in rows) / n,
        "mean_tokens": sum(row["num_tokens"] for row in rows) / n,
        "parse_failure_rate": statuses.count(Status.PARSE_FAILURE) / n,
        "status_rates": status_rates(statuses),
    }
    for metric in ("strict", "lenient"):
        right = sum(row[metric] for row in rows)
        found[metric] = right / n
        if confidence is not None:
            found[f"{metric}_low"], found[f"{metric}_high"] = wilson(right, n, confidence)
    return found


def _markdown(variant: str, figures: Mapping[str, Any], evaluate: EvaluateConfig) -> str:
    lines = [
        f"Variant **{variant}**, intervals at {evaluate.confidence:.0%}.",
        "",
        "| benchmark | decoding | questions | strict | lenient | no answer read | cut off |",
        "|---|---|---|---|---|---|---|",
    ]
    for benchmark, decodings in figures.items():
        for decoding, found in decodings.items():
            lines.append(
                f"| {benchmark} | {decoding} | {found['num_questions']:,} "
                f"| {_with_interval(found, 'strict')} | {_with_interval(found, 'lenient')} "
                f"| {found['parse_failure_rate']:.1%} | {found['truncated_share']:.1%} |"
            )
    return "\n".join(lines)


def _with_interval(found: Mapping[str, Any], metric: str) -> str:
    if f"{metric}_low" not in found:
        return f"{found[metric]:.3f}"
    low, high = found[f"{metric}_low"], found[f"{metric}_high"]
    return f"{found[metric]:.3f} ({low:.3f} to {high:.3f})"
