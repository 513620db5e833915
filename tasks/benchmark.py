"""Stage 'benchmark': measure the prompt formats on the dev questions, before the maths.

Every format puts the same questions, decodes greedily and is read by its own rules. Strict counts
right answers in exactly the demanded format, lenient right answers wherever the format lets them
be found: the gap is what the format costs. Where answers stood instead is counted too, because the
cure for a model that boxes everything is another prompt, not training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.answer_places import WORDS, Place, elsewhere
from ratchet.config import (
    BenchmarkConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
    WorkersConfig,
)
from ratchet.errors import UserError
from ratchet.prompts import OPENING_TAG, STYLE_OF, prefilled_tag, prompt_text
from ratchet.stats import wilson
from ratchet.verifier import Status, Verdict, close_shared_pool, status_rates, verify_batch
from tasks.context import StageContext, StageResult
from tasks.models import load_tokenizer
from tasks.sampling import Sampled, sample_shards
from tasks.shards import SampleRequest

SHARD_QUESTIONS = 256
FORMAT_GAP = 0.05
"""Share of questions lost to the format from which on it is called the problem."""


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    workers: WorkersConfig,
    benchmark: BenchmarkConfig,
) -> StageResult:
    """Answer the dev questions in each format and verify. UserError when there are none."""
    rows = ctx.inputs["questions"].table("questions").to_pylist()
    questions = [row for row in rows if row["role"] == "dev"][: benchmark.limit]
    if not questions:
        raise UserError("no dev questions are left for the benchmark: widen questions.dev")
    formats = list(dict.fromkeys(benchmark.formats or (prompt.format,)))
    requests = [SampleRequest(questions, one, 1, 1, 0.0, SHARD_QUESTIONS) for one in formats]
    answers = sample_shards(ctx, requests, model_config=model, sampler=sampler, workers=workers)
    prefills = prefilled_texts(ctx, model, formats, questions[0]["question"])
    found = [
        measure(one, questions, sampled, prefills[one])
        for one, sampled in zip(formats, answers, strict=True)
    ]
    close_shared_pool()
    ctx.write_table("benchmark", [row for row, _ in found])
    words = sentences([row for row, _ in found], prompt.format)
    summary = {
        "num_questions": len(questions),
        "formats": {row["prompt_format"]: _figures(row, verdicts) for row, verdicts in found},
        "words": words,
        "num_shards": sum(sampled.num_shards for sampled in answers),
        "num_shards_reused": sum(sampled.num_reused for sampled in answers),
    }
    return StageResult(
        summary=summary,
        markdown=_markdown([row for row, _ in found], words),
        sampled_tokens=sum(sampled.new_tokens for sampled in answers),
        device_seconds=sum(sampled.generate_seconds for sampled in answers),
    )


def prefilled_texts(
    ctx: StageContext, model: ModelConfig, formats: Sequence[PromptFormat], question: str
) -> dict[PromptFormat, str]:
    """What the chat template writes at the start of the answer, by format."""
    tokenizer = load_tokenizer(ctx.inputs["model"])
    return {
        one: OPENING_TAG
        if prefilled_tag(
            prompt_text(tokenizer, one, question, enable_thinking=model.enable_thinking)
        )
        else ""
        for one in formats
    }


def measure(
    prompt_format: PromptFormat,
    questions: Sequence[Mapping[str, Any]],
    sampled: Sampled,
    prefilled: str,
) -> tuple[dict[str, Any], list[Verdict]]:
    """The format's row of table 'benchmark', and the verdict on each question."""
    style = STYLE_OF[prompt_format]
    texts = sampled.table.column("text").to_pylist()
    reasons = sampled.table.column("finish_reason").to_pylist()
    lengths = sampled.table.column("num_tokens").to_pylist()
    golds = [row["gold"] for row in questions]
    verdicts = verify_batch(texts, golds, style, prefilled=prefilled)
    n = len(texts)
    strict = sum(verdict.strict for verdict in verdicts)
    lenient = sum(verdict.lenient for verdict in verdicts)
    strict_low, strict_high = wilson(strict, n)
    lenient_low, lenient_high = wilson(lenient, n)
    row = {
        "prompt_format": prompt_format.value,
        "decoding": "greedy",
        "num_questions": n,
        "strict": strict / n,
        "strict_low": strict_low,
        "strict_high": strict_high,
        "lenient": lenient / n,
        "lenient_low": lenient_low,
        "lenient_high": lenient_high,
        "parse_failure_rate": status_rates(v.status for v in verdicts)[Status.PARSE_FAILURE],
        "truncated_share": reasons.count("length") / n,
        "mean_tokens": sum(lengths) / n,
        "answers_elsewhere": json.dumps(elsewhere(texts, style)),
    }
    return row, verdicts


def sentences(rows: Sequence[Mapping[str, Any]], own: PromptFormat) -> list[str]:
    """What the figures mean, in words: per format whether format or maths loses the points, then
    whether another format than the run's `own` does better beyond doubt (intervals apart)."""
    words = [_format_sentence(row) for row in rows]
    by_format = {row["prompt_format"]: row for row in rows}
    best = max(rows, key=lambda row: row["strict"])
    mine = by_format.get(own.value)
    if mine is None:
        words.append(f"The run's own format, {own.value}, was not measured.")
    elif mine["strict_high"] < best["strict_low"]:
        words.append(
            f"{best['prompt_format']} gets {best['strict']:.1%} strictly right, the run's "
            f"{own.value} {mine['strict']:.1%}: consider prompt.format = "
            f"'{best['prompt_format']}'."
        )
    return words


def _format_sentence(row: Mapping[str, Any]) -> str:
    gap = row["lenient"] - row["strict"]
    places = json.loads(row["answers_elsewhere"])
    start = f"{row['prompt_format']}: {row['strict']:.1%} right in the demanded format"
    if gap < FORMAT_GAP:
        missing = sum(places.values())
        note = _instead(places) if missing >= FORMAT_GAP else "the answers stand where they should"
        return f"{start}, {row['lenient']:.1%} right anywhere; {note}."
    return (
        f"{start}, {row['lenient']:.1%} right anywhere: the format, not the maths, costs "
        f"{gap * 100:.0f} points; {_instead(places)}."
    )


def _instead(places: Mapping[str, float]) -> str:
    if not places:
        return "the answers stand in the right place but not in the exact format"
    parts = [f"{share:.0%} {WORDS[Place(place)]}" for place, share in places.items()]
    return f"instead of the demanded place, answers stood {', '.join(parts)}"


def _figures(row: Mapping[str, Any], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """A format's figures for the manifest."""
    kept = ("strict", "lenient", "parse_failure_rate", "truncated_share", "mean_tokens")
    return {name: row[name] for name in kept} | {
        "answers_elsewhere": json.loads(row["answers_elsewhere"]),
        "status_rates": status_rates(verdict.status for verdict in verdicts),
    }


def _markdown(rows: Sequence[Mapping[str, Any]], words: Sequence[str]) -> str:
    lines = [
        "| format | strict | lenient | no answer read | cut off | mean tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['prompt_format']} "
            f"| {row['strict']:.3f} ({row['strict_low']:.3f} to {row['strict_high']:.3f}) "
            f"| {row['lenient']:.3f} ({row['lenient_low']:.3f} to {row['lenient_high']:.3f}) "
            f"| {row['parse_failure_rate']:.1%} | {row['truncated_share']:.1%} "
            f"| {row['mean_tokens']:.0f} |"
        )
    return "\n".join([*lines, "", *(f"- {line}" for line in words)])
