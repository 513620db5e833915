"""Stage 'benchmark': measure prompt formats, thinking and decoding, before the maths.

Every setting (format × thinking × decoding) puts the same questions and is read by its format's
rules. Strict counts right answers in exactly the demanded format, lenient right answers wherever
the format lets them be found: the gap is what the format costs. Where answers stood instead is
counted too, because the cure for a model that boxes everything is another prompt, not training.
Only what follows a thought counts as the answer. What the figures say in words is decided in
`ratchet.diagnostics.format_words`.

Launch: `ratchet benchmark`, or as a part of a run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ratchet.config.run import (
    BenchmarkConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
    WorkersConfig,
)
from ratchet.diagnostics.format_words import places_in_short, row_name, sentences, with_interval
from ratchet.errors import UserError
from ratchet.evaluation.stats import wilson
from ratchet.prompts import STYLE_OF, answer_start, prompt_text
from ratchet.prompts.thinking import check_thinking, has_switch
from ratchet.store.store import Artifact
from ratchet.verifier import Status, Verdict, close_shared_pool, status_rates, verify_batch
from ratchet.verifier.answer_places import elsewhere
from tasks.models.checkpoints import load_tokenizer
from tasks.runtime.context import StageContext, StageResult
from tasks.sampling.decoding import GREEDY, Decoding, own_decoding
from tasks.sampling.sample import Sampled, sample_shards
from tasks.sampling.shards import SampleRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_QUESTIONS = 256
NOTE_ON_TEST = (
    "Measured on test questions: a prompt for a run that is compared on them is better chosen on "
    "dev questions, or the comparison looks better than it is."
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One way of asking."""

    prompt_format: PromptFormat
    thinking: str
    """'on', 'off', or 'no switch' where the chat template knows none."""
    decoding: Decoding

    def request(self, questions: Sequence[Mapping[str, Any]]) -> SampleRequest:
        """One completion of each question."""
        return SampleRequest(
            questions,
            self.prompt_format,
            num_samples=1,
            block=1,
            temperature=self.decoding.temperature,
            shard_questions=SHARD_QUESTIONS,
            shaping=self.decoding.shaping,
            enable_thinking=self.thinking == "on",
        )


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    workers: WorkersConfig,
    benchmark: BenchmarkConfig,
) -> StageResult:
    """Answer the questions in each setting and verify.

    UserError, before anything is sampled, when there are no questions, or the model can't think or
    says nothing of its own sampling where that is asked for.
    """
    questions = chosen_questions(ctx.inputs["questions"], benchmark)
    tokenizer = load_tokenizer(ctx.inputs["model"])
    asked = settings(benchmark, model, prompt, ctx.inputs["model"], tokenizer)
    requests = [setting.request(questions) for setting in asked]
    answers = sample_shards(ctx, requests, model_config=model, sampler=sampler, workers=workers)
    found = [
        measure(setting, questions, sampled, answer_start(_example(tokenizer, setting, questions)))
        for setting, sampled in zip(asked, answers, strict=True)
    ]
    close_shared_pool()
    rows = [row for row, _ in found]
    ctx.write_table("benchmark", rows)
    words = sentences(rows, prompt.format, model.enable_thinking)
    words += [NOTE_ON_TEST] if benchmark.role == "test" else []
    sources = dict(Counter(row["source"] for row in questions))
    summary = {
        "num_questions": len(questions),
        "role": benchmark.role,
        "sources": sources,
        "max_completion_tokens": sampler.max_completion_tokens,
        "formats": {row_name(row): _figures(row, verdicts) for row, verdicts in found},
        "words": words,
        "num_shards": sum(sampled.num_shards for sampled in answers),
        "num_shards_reused": sum(sampled.num_reused for sampled in answers),
    }
    asked_of = ", ".join(f"{count:,} of {source}" for source, count in sources.items())
    return StageResult(
        summary=summary,
        markdown=_markdown(
            rows, words, f"{benchmark.role} questions: {asked_of}", sampler.max_completion_tokens
        ),
        sampled_tokens=sum(sampled.new_tokens for sampled in answers),
        device_seconds=sum(sampled.generate_seconds for sampled in answers),
    )


def chosen_questions(artifact: Artifact, benchmark: BenchmarkConfig) -> list[Row]:
    """The questions to ask. UserError when there are none."""
    rows = artifact.table("questions").to_pylist()
    found = [row for row in rows if row["role"] == benchmark.role]
    if not found:
        raise UserError(
            f"no {benchmark.role} questions are left for the benchmark: widen questions."
            f"{benchmark.role} or choose another benchmark.role"
        )
    if benchmark.source is not None:
        names = ", ".join(dict.fromkeys(row["source"] for row in found))
        found = [row for row in found if row["source"] == benchmark.source]
        if not found:
            raise UserError(
                f"benchmark.source = '{benchmark.source}' is no source of the {benchmark.role} "
                f"questions: they come from {names}"
            )
    return found[: benchmark.limit]


def settings(
    benchmark: BenchmarkConfig,
    model: ModelConfig,
    prompt: PromptConfig,
    artifact: Artifact,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Setting]:
    """Every combination asked for, formats outermost. UserError when the model can't think or says
    nothing of its own sampling where that is asked for."""
    formats = list(dict.fromkeys(benchmark.formats or (prompt.format,)))
    thinking = list(dict.fromkeys(benchmark.thinking or (model.enable_thinking,)))
    if True in thinking:
        setting = "benchmark.thinking" if benchmark.thinking else "model.enable_thinking"
        check_thinking(tokenizer, formats[0], setting)
    switch = has_switch(tokenizer, formats[0])
    names = {True: "on", False: "off" if switch else "no switch"}
    decodings = [
        GREEDY if name == GREEDY.name else own_decoding(artifact)
        for name in dict.fromkeys(benchmark.decoding)
    ]
    return [
        Setting(prompt_format, names[thought], decoding)
        for prompt_format, thought, decoding in product(formats, thinking, decodings)
    ]


def _example(
    tokenizer: PreTrainedTokenizerBase, setting: Setting, questions: Sequence[Mapping[str, Any]]
) -> str:
    """One prompt of the setting."""
    return prompt_text(
        tokenizer,
        setting.prompt_format,
        questions[0]["question"],
        enable_thinking=setting.thinking == "on",
    )


def measure(
    setting: Setting,
    questions: Sequence[Mapping[str, Any]],
    sampled: Sampled,
    prefilled: str,
) -> tuple[Row, list[Verdict]]:
    """The setting's row of table 'benchmark', and the verdict on each question. `prefilled` is what
    the chat template writes of the answer itself."""
    style = STYLE_OF[setting.prompt_format]
    texts = [prefilled + text for text in sampled.table.column("text").to_pylist()]
    reasons = sampled.table.column("finish_reason").to_pylist()
    verdicts = verify_batch(texts, [row["gold"] for row in questions], style)
    n = len(texts)
    row = {
        "prompt_format": setting.prompt_format.value,
        "thinking": setting.thinking,
        **setting.decoding.columns(),
        "num_questions": n,
        "parse_failure_rate": status_rates(v.status for v in verdicts)[Status.PARSE_FAILURE],
        "truncated_share": reasons.count("length") / n,
        "mean_tokens": sum(sampled.table.column("num_tokens").to_pylist()) / n,
        "answers_elsewhere": json.dumps(elsewhere(texts, style)),
    }
    for metric in ("strict", "lenient"):
        right = sum(getattr(verdict, metric) for verdict in verdicts)
        row[metric] = right / n
        row[f"{metric}_low"], row[f"{metric}_high"] = wilson(right, n)
    return row, verdicts


def _figures(row: Mapping[str, Any], verdicts: Sequence[Verdict]) -> Row:
    """A setting's figures for the manifest."""
    kept = ("strict", "lenient", "parse_failure_rate", "truncated_share", "mean_tokens")
    return {name: row[name] for name in kept} | {
        "answers_elsewhere": json.loads(row["answers_elsewhere"]),
        "status_rates": status_rates(verdict.status for verdict in verdicts),
    }


def _markdown(rows: Sequence[Row], words: Sequence[str], asked: str, max_tokens: int) -> str:
    """The table, narrow enough for a terminal, and the words."""
    moved = any(places_in_short(row) for row in rows)
    heads = ["format", "strict, %", "lenient, %", "unread", "cut off", "tokens"]
    heads += ["answers instead"] if moved else []
    lines = [
        f"{'; '.join([asked, f'at most {max_tokens} tokens', *_settings_words(rows)])}. "
        "Intervals: Wilson, 95%.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for row in rows:
        cells = [
            row_name(row),
            with_interval(row, "strict").replace("%", ""),
            with_interval(row, "lenient").replace("%", ""),
            f"{row['parse_failure_rate']:.1%}",
            f"{row['truncated_share']:.1%}",
            f"{row['mean_tokens']:.0f}",
            *([places_in_short(row)] if moved else []),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join([*lines, "", *(f"- {line}" for line in words)])
    return text.replace("<", "\\<")  # a tag is no markup


def _settings_words(rows: Sequence[Row]) -> list[str]:
    """Thinking and decoding, where the names of the rows don't say them."""
    said = ["thinking off, where it isn't named"]
    if all(row["thinking"] != "on" for row in rows):
        said = [f"thinking: {rows[0]['thinking']}"]
    own = next((row for row in rows if row["decoding"] != GREEDY.name), None)
    if own is None:
        return [*said, "greedy"]
    off = {name: value for name, value in GREEDY.columns().items() if name != "decoding"}
    changed = (f"{name} {own[name]:g}" for name, value in off.items() if own[name] != value)
    return [*said, f"own sampling: {', '.join(changed)}"]
