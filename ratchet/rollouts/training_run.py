"""A GRPO run as it can be read: finished, or still under way.

A finished run is an artifact; one that trains has left its steps in the stage's work folder. Either
way the same rows come out, so that a person can look while training goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.run import GrpoConfig, GuardConfig
from ratchet.diagnostics.doctor import Evidence
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF
from ratchet.rewards.weights import default_weights
from ratchet.rollouts.training_log import TrainingLog

if TYPE_CHECKING:
    import pyarrow as pa

    from ratchet.store.store import Artifact, Store

STAGE = "grpo"
STEPS_FOLDER = "steps"
"""Where a stage under way keeps its steps, in its work folder."""
EXAMINED_STEPS = 10
"""Steps whose rollouts the doctor reads."""


@dataclass(frozen=True)
class Training:
    """Metrics and rollouts of one GRPO run."""

    label: str
    """Which run it is, for people."""
    metrics: list[dict[str, Any]]
    """In order of steps."""
    rollouts: pa.Table
    config: Mapping[str, Any]
    """The configuration sections of the stage, as JSON values."""
    adapter: Mapping[str, Any] | None
    """The adapter's configuration, where it is there."""
    questions: Artifact | None
    """The questions it trains on; None where they were removed."""

    @property
    def steps(self) -> list[int]:
        """Steps with rollouts, in order."""
        return sorted(set(self.rollouts.column("step").to_pylist()))

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward, in order."""
        style = STYLE_OF[self.config["prompt"]["format"]]
        return self.config["rewards"]["weights"] or default_weights(style)

    def texts(self) -> dict[str, tuple[str, str]]:
        """Question and gold answer by question id."""
        if self.questions is None:
            return {}
        rows = self.questions.table("questions", ["question_id", "question", "gold"]).to_pylist()
        return {row["question_id"]: (row["question"], row["gold"]) for row in rows}

    def rollouts_of(self, steps: list[int]) -> list[dict[str, Any]]:
        """Rows of the `rollouts` table of these steps."""
        import pyarrow.compute as pc

        chosen = self.rollouts.filter(pc.field("step").isin(steps))
        found: list[dict[str, Any]] = chosen.to_pylist()
        return found

    def evidence(self) -> Evidence:
        """What the doctor examines."""
        return evidence_of(
            self.config,
            self.metrics,
            self.rollouts_of(self.steps[-EXAMINED_STEPS:]),
            self.adapter,
        )


def evidence_of(
    config: Mapping[str, Any],
    metrics: list[dict[str, Any]],
    rollouts: list[dict[str, Any]],
    adapter: Mapping[str, Any] | None,
) -> Evidence:
    """Evidence for the doctor; `config` holds the sections of the stage as JSON values."""
    style = STYLE_OF[config["prompt"]["format"]]
    return Evidence(
        metrics=metrics,
        rollouts=rollouts,
        grpo=GrpoConfig.model_validate(config["grpo"]),
        guard=GuardConfig.model_validate(config.get("guard", {})),
        dtype=config["model"]["dtype"],
        style=style,
        max_completion_tokens=config["sampler"]["max_completion_tokens"],
        weights=config["rewards"]["weights"] or default_weights(style),
        adapter=adapter,
    )


def open_training(store: Store, ref: str) -> Training:
    """The GRPO run that `ref` names: a run, RUN/grpo, or the key of a GRPO artifact.

    UserError when there is none, or when it hasn't finished a step.
    """
    from ratchet.store.lineage import find_artifact, names_a_run
    from ratchet.store.runs import load_run

    if not names_a_run(store, ref.removesuffix(f"/{STAGE}")):
        return _finished(store, find_artifact(store, ref))
    run = load_run(store, ref.removesuffix(f"/{STAGE}"))
    node = next((node for node in run.nodes.values() if node.stage == STAGE), None)
    if node is None:
        raise UserError(f"run {run.run_id} has no GRPO stage")
    artifact = store.find(STAGE, node.key)
    if artifact is not None:
        return _finished(store, artifact)
    folder = store.work_folder(STAGE, node.key) / STEPS_FOLDER
    if not folder.is_dir():
        raise UserError(
            f"run {run.run_id} has not begun to train: its grpo stage is {node.state}"
            f"{_trained_run(store)}"
        )
    # The node that training reads its questions from; runs of older code have one for all.
    asked = run.nodes.get("decontaminate") or run.nodes["questions"]
    questions = store.find(asked.stage, asked.key)
    return _under_way(run.run_id, folder, run.config, questions)


def _trained_run(store: Store) -> str:
    """'; the newest run that trained is …' where there is one."""
    from ratchet.store.runs import all_runs

    for run in all_runs(store):
        node = run.nodes.get(STAGE)
        if node is not None and store.find(STAGE, node.key) is not None:
            return f"; the newest run that trained is {run.run_id}"
    return ""


def _finished(store: Store, artifact: Artifact) -> Training:
    manifest = artifact.manifest
    if manifest.stage != STAGE:
        raise UserError(f"{artifact.ref} is no GRPO run: name a run, or an artifact of stage grpo")
    adapter = artifact.folder / "adapter" / "adapter_config.json"
    parent = manifest.parents["questions"]
    return Training(
        label=f"{manifest.run_id} ({artifact.ref[: len(STAGE) + 9]})",
        metrics=artifact.table("metrics").to_pylist(),
        rollouts=artifact.table("rollouts"),
        config=manifest.config,
        adapter=json.loads(adapter.read_text("utf-8")) if adapter.exists() else None,
        questions=store.find(parent.stage, parent.key),
    )


def _under_way(
    run_id: str, folder: Path, config: Mapping[str, Any], questions: Artifact | None
) -> Training:
    log = TrainingLog(folder)
    metrics = log.metrics()
    if not metrics:
        raise UserError(f"run {run_id} has not finished its first training step yet")
    return Training(
        label=f"{run_id} (training)",
        metrics=metrics,
        rollouts=log.rollouts(),
        config=config,
        adapter=None,
        questions=questions,
    )
