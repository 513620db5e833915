"""Everything the page shows, read once from the artifacts of a run.

The artifacts come by node name, in the order of the pipeline. What a run lacks (a benchmark, a warm
start) is empty, and so is what isn't given where a single stage's figures are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ratchet.config.run import GuardConfig
from ratchet.diagnostics.drift import healthy_drift
from ratchet.prompts import STYLE_OF
from ratchet.report.before_after import PassRates, pass_rates_of
from ratchet.report.ledger import Entry, ledger
from ratchet.rewards.weights import default_weights
from ratchet.store.manifest import Manifest
from ratchet.store.store import Artifact

Row = dict[str, Any]

VARIANT_NAMES = {"baseline": "baseline", "rl": "after RL"}
WARMSTART_NAMES = {"warmstart_sft": "after SFT", "warmstart_opd": "after OPD"}


@dataclass(frozen=True)
class Gathered:
    """A run as data."""

    run_id: str
    inputs: Mapping[str, Artifact]
    """By node, in pipeline order."""
    compared: list[Row]
    """Rows of the comparison table."""
    summary: Row
    """Summary of the comparison."""
    changed: list[Row]
    """Improvements and regressions, with both completions."""
    selection: Row
    """Summary of the filter."""
    contaminated: list[Row]
    """Training questions that gave a held-out one away, and were dropped."""
    rollouts: Row | None
    """Summary of the rollouts that stood in for presamples."""
    benchmark: list[Row]
    benchmark_words: list[str]
    """What the benchmark says of the prompt formats."""
    warmstart_metrics: list[Row]
    grpo_metrics: list[Row]

    @cached_property
    def manifests(self) -> dict[str, Manifest]:
        """By node, in pipeline order."""
        return {name: artifact.manifest for name, artifact in self.inputs.items()}

    @cached_property
    def ledger(self) -> list[Entry]:
        """What the run's tokens were spent on."""
        return ledger(self.inputs)

    @cached_property
    def pass_rates(self) -> PassRates | None:
        """Before and after training; None where nothing was sampled after it."""
        return pass_rates_of(self.inputs, self.variants)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each reward that RL was given."""
        config = self.manifests["grpo"].config
        style = STYLE_OF[config["prompt"]["format"]]
        return config["rewards"]["weights"] or default_weights(style)

    @property
    def warmstart_stage(self) -> str | None:
        """'warmstart_sft', 'warmstart_opd' or None."""
        manifest = self.manifests.get("warmstart")
        return None if manifest is None else manifest.stage

    @property
    def variants(self) -> list[str]:
        """Variants in order, the judged one last."""
        return list(self.summary["variant_order"])

    @property
    def confidence(self) -> float:
        """Level of all intervals."""
        return float(self.summary["confidence"])

    def drift_limits(self, first_drift: float) -> tuple[float, float]:
        """Drift, in nats per token, from which the guard of the RL run warned and halted."""
        config = self.manifests["grpo"].config
        guard = GuardConfig.model_validate(config["guard"])
        level = healthy_drift(first_drift, config["model"]["dtype"])
        return guard.warn_drift * level, guard.halt_drift * level

    def variant_name(self, variant: str) -> str:
        """A variant for people: 'baseline', 'after SFT', 'after RL', or its own name."""
        if variant == "warmstart" and self.warmstart_stage is not None:
            return WARMSTART_NAMES[self.warmstart_stage]
        return VARIANT_NAMES.get(variant, variant)

    def variant_row(self, variant: str, benchmark: str, band: str = "all") -> Row:
        """The greedy description of one variant on one slice."""
        wanted = (variant, "greedy", benchmark, band)
        columns = ("variant", "decoding", "benchmark", "band")
        return next(r for r in self.summary["variants"] if tuple(r[c] for c in columns) == wanted)

    def pair_rows(
        self, variant_a: str, variant_b: str, metric: str, decoding: str = "greedy"
    ) -> list[Row]:
        """Comparison rows of a pair of variants, benchmarks whole and by band."""
        wanted = (variant_a, variant_b, metric, decoding)
        columns = ("variant_a", "variant_b", "metric", "decoding")
        return [row for row in self.compared if tuple(row[c] for c in columns) == wanted]

    @property
    def benchmarks(self) -> list[str]:
        """Held-out benchmarks, in order."""
        return [item["benchmark"] for item in self.summary["verdicts"]]


def gather(inputs: Mapping[str, Artifact], run_id: str) -> Gathered:
    """Read a run's artifacts (by node name), or as many of them as there are."""

    def rows(node: str, table: str) -> list[Row]:
        return inputs[node].table(table).to_pylist() if node in inputs else []

    def summary(node: str) -> Row:
        return inputs[node].manifest.summary if node in inputs else {}

    changed = ""
    if "compare" in inputs:
        changed = inputs["compare"].path("changed_answers.jsonl").read_text("utf-8")
    return Gathered(
        run_id=run_id,
        inputs=inputs,
        compared=rows("compare", "comparison"),
        summary=summary("compare"),
        changed=[json.loads(line) for line in changed.splitlines()],
        selection=summary("filter"),
        contaminated=rows("decontaminate", "contaminated"),
        rollouts=summary("rollouts") or None,
        benchmark=rows("benchmark", "benchmark"),
        benchmark_words=summary("benchmark").get("words", []),
        warmstart_metrics=rows("warmstart", "metrics"),
        grpo_metrics=rows("grpo", "metrics"),
    )
