"""Compare the variants on the held-out questions and say in words what was gained.

Variants are compared only if they answered the same questions, the same number of times, with the
same prompt, limits and verifier; anything else is an error. Benchmarks are reported apart: held-out
symbolic templates are a benchmark of their own. Regressions and improvements are listed with both
completions. What the figures mean is told in docs/evaluation.md.
"""

from __future__ import annotations

import json
from itertools import pairwise

from ratchet.config.run import EvaluateConfig
from ratchet.errors import UserError
from ratchet.evaluation.comparison_result import (
    compare_evaluations,
    known_benchmarks,
    markdown,
    price_of,
)
from ratchet.evaluation.variants import variant_names
from ratchet.store.store import Artifact
from tasks.runtime.context import StageContext, StageResult


def check_same_code(variants: dict[str, Artifact]) -> None:
    """UserError unless the same code evaluated all variants."""
    for (name_a, a), (name_b, b) in pairwise(variants.items()):
        if a.manifest.code_version != b.manifest.code_version:
            raise UserError(
                f"variants '{name_a}' and '{name_b}' were scored by different versions of the "
                "code: evaluate both again"
            )


def run(ctx: StageContext, *, evaluate: EvaluateConfig) -> StageResult:
    """Write the comparison table, the changed answers and the verdict."""
    names = variant_names(list(ctx.inputs))
    artifacts = {name: ctx.inputs[name] for name in names}
    check_same_code(artifacts)
    judged = compare_evaluations(
        artifacts,
        ctx.inputs["questions"],
        samples=evaluate.samples,
        confidence=evaluate.confidence,
        seed=ctx.seed,
        price=price_of(ctx.store, artifacts),
    )
    ctx.write_table("comparison", judged.compared)
    with (ctx.out_dir / "changed_answers.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in judged.changed)
    (ctx.out_dir / "verdict.txt").write_text(judged.line + "\n", encoding="utf-8")
    for warning in judged.warnings:
        ctx.log(f"warning: {warning}")
    sources = ctx.inputs["questions"].manifest.config["questions"]["test"]
    summary = {
        "num_questions": sum(
            row["num_questions"]
            for row in judged.described
            if (row["variant"], row["decoding"], row["band"]) == (names[0], "greedy", "all")
        ),
        "verdict": judged.line,
        "outcome": judged.verdicts[0].outcome.value,
        "verdicts": [item.as_dict() for item in judged.verdicts],
        "warnings": judged.warnings,
        "about": known_benchmarks(sources).about,
        "variant_order": names,
        "variants": judged.described,
        "changed_answers": judged.num_changed,
        "num_changed_listed": len(judged.changed),
        "confidence": evaluate.confidence,
    }
    return StageResult(summary=summary, markdown=markdown(judged))
