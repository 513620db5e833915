"""Everything the page shows, read once from the artifacts of a run.

The artifacts come by node name, in the order of the pipeline. Stages a run may lack (benchmark,
warm start) leave empty lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.config.run import GuardConfig
from ratchet.diagnostics.drift import healthy_drift
from ratchet.prompts import STYLE_OF
from ratchet.report.before_after import PassRates, pass_rates_of
from ratchet.report.ledger import Entry, ledger
from ratchet.report.words import arm_name
from ratchet.rewards.weights import default_weights
from ratchet.store.manifest import Manifest
from ratchet.store.store import Artifact

Row = dict[str, Any]


@dataclass(frozen=True)
class Gathered:
    """A run as data."""

    run_id: str
    manifests: dict[str, Manifest]
    """By node, in pipeline order."""
    compared: list[Row]
    """Rows of the comparison table."""
    summary: Row
    """Summary of the comparison."""
    flips: list[Row]
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
    ledger: list[Entry]
    pass_rates: PassRates | None = None
    """Before and after training; None where nothing was sampled after it."""

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
    def arms(self) -> list[str]:
        """Arms in order, the judged one last."""
        return list(self.summary["arm_order"])

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

    def arm_name(self, arm: str) -> str:
        """An arm's name for people."""
        return arm_name(arm, self.warmstart_stage)

    def arm_row(self, arm: str, benchmark: str, band: str = "all") -> Row:
        """The greedy description of one arm on one slice."""
        wanted = (arm, "greedy", benchmark, band)
        columns = ("arm", "decoding", "benchmark", "band")
        return next(r for r in self.summary["arms"] if tuple(r[c] for c in columns) == wanted)

    def pair_rows(self, arm_a: str, arm_b: str, metric: str, decoding: str = "greedy") -> list[Row]:
        """Comparison rows of a pair of arms, benchmarks whole and by band."""
        wanted = (arm_a, arm_b, metric, decoding)
        columns = ("arm_a", "arm_b", "metric", "decoding")
        return [row for row in self.compared if tuple(row[c] for c in columns) == wanted]

    @property
    def benchmarks(self) -> list[str]:
        """Held-out benchmarks, in order."""
        return [item["benchmark"] for item in self.summary["verdicts"]]


def gather(inputs: Mapping[str, Artifact], run_id: str) -> Gathered:
    """Read a run's artifacts (by node name)."""
    compare, grpo = inputs["compare"], inputs["grpo"]
    flips = compare.path("flips.jsonl").read_text(encoding="utf-8").splitlines()
    logged = inputs.get("rollouts")
    warm, measured = inputs.get("warmstart"), inputs.get("benchmark")
    return Gathered(
        run_id=run_id,
        manifests={name: artifact.manifest for name, artifact in inputs.items()},
        compared=compare.table("comparison").to_pylist(),
        summary=compare.manifest.summary,
        flips=[json.loads(line) for line in flips],
        selection=inputs["filter"].manifest.summary,
        contaminated=inputs["decontaminate"].table("contaminated").to_pylist(),
        rollouts=None if logged is None else logged.manifest.summary,
        benchmark=[] if measured is None else measured.table("benchmark").to_pylist(),
        benchmark_words=[] if measured is None else measured.manifest.summary["words"],
        warmstart_metrics=[] if warm is None else warm.table("metrics").to_pylist(),
        grpo_metrics=grpo.table("metrics").to_pylist(),
        ledger=ledger(inputs),
        pass_rates=pass_rates_of(inputs, compare.manifest.summary["arm_order"]),
    )
