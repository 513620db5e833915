"""What the Prefect UI shows of one stage, as Markdown: its figures first.

Pure text: `flows.pages.publish` publishes it. Links lead to the flow runs that made an artifact, as
far as the server knows them; without one a run is named in plain text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from flows.execution.executor import NodeOutcome, RunExecutor
from flows.execution.terminal import KEY_DIGITS, duration
from flows.pages.charts import HAVE_CHARTS, drawn
from flows.pages.markdown import bar, cell, code, linked, table, whole, without_code_blocks
from ratchet.config.run import RunConfig, Section
from ratchet.pipeline.dag import STAGES
from ratchet.pipeline.plan import PlannedNode, changes
from ratchet.report.headlines import headline
from ratchet.store.manifest import Manifest
from ratchet.store.runs import NodeState, log_file
from ratchet.store.store import Artifact

DEPLOYMENT_PATH = "/v2/deployments/deployment"
LOG_LINES = 25
"""Of a failed stage's log, shown on its page."""


@dataclass
class Links:
    """What the pages of a run can lead to on its server."""

    known: frozenset[str] = frozenset()
    """Flow runs that made artifacts of this run's stages and that the server has."""
    here: dict[str, str] = field(default_factory=dict)
    """Flow runs of the present run, by node."""
    forms: dict[str, str] = field(default_factory=dict)
    """Deployments that a person can start, by 'flow/deployment'."""

    def maker(self, artifact: Artifact | None) -> str | None:
        """The flow run that made the artifact."""
        found = None if artifact is None else artifact.manifest.prefect.get("flow_run_id")
        return found if found in self.known or found in self.here.values() else None

    def of(self, node: str, artifact: Artifact | None) -> str | None:
        """The flow run that shows a node's artifact: its maker, or else the one that found it in
        the present run."""
        return self.maker(artifact) or self.here.get(node)

    def form(self, text: str, deployment: str, **values: str) -> list[str]:
        """A line that leads to a deployment's form with values filled in; none without it."""
        if deployment not in self.forms:
            return []
        address = f"{DEPLOYMENT_PATH}/{self.forms[deployment]}/run"
        return [f"[{text}]({address}?{urlencode({'parameters': json.dumps(values)})})", ""]


def made_by(executor: RunExecutor, node: str, links: Links) -> str:
    """Who made a node's artifact, in a few linked words."""
    artifact = executor.artifact(node)
    if artifact is None:
        return "not there"
    run_id = artifact.manifest.run_id
    link = links.of(node, artifact)
    if run_id == executor.record.run_id:
        return linked("this run", link)
    return linked(run_id, link)


def _how(outcome: NodeOutcome, artifact: Artifact, links: Links) -> str:
    """One sentence: built or reused, by whom."""
    manifest = artifact.manifest
    took = f"in {whole(duration(manifest.duration_seconds))} on {manifest.device}"
    if manifest.sampled_tokens:
        took += f", {manifest.sampled_tokens:,} tokens sampled"
    if outcome.state is NodeState.DONE:
        return f"**built** {took}"
    made = linked(f"run {manifest.run_id}", links.maker(artifact))
    when = whole(f"{manifest.started_at[:16].replace('T', ' ')} UTC")
    return f"**reused**: made by {made}, {when}, {took}"


def _bars(artifact: Artifact) -> list[str]:
    """Accuracies as bars, for stages that compare some."""
    summary, stage = artifact.manifest.summary, artifact.manifest.stage
    if stage == "benchmark":
        shares = {name: figures["strict"] for name, figures in summary["formats"].items()}
    elif stage == "evaluate":
        shares = {
            f"{name}, {decoding}": figures["strict"]
            for name, decodings in summary["benchmarks"].items()
            for decoding, figures in decodings.items()
        }
    else:
        return []
    rows = [(cell(name), bar(share)) for name, share in shares.items()]
    return table(("format" if stage == "benchmark" else "benchmark", "strictly right"), rows)


def plots(executor: RunExecutor, planned: PlannedNode) -> list[str]:
    """Lines that show a stage's plots."""
    names = [planned.node.name]
    if planned.node.stage == "compare":
        names.append("warmstart")  # it names an arm
    present = {one.node.name for one in executor.plan.nodes}
    found = {name: executor.artifact(name) for name in names if name in present}
    # A control's node, `grpo.random-reward`, is drawn as the run's own.
    inputs = {name.partition(".")[0]: item for name, item in found.items() if item}
    return drawn(planned.node.stage, inputs)


def _plots(
    executor: RunExecutor, planned: PlannedNode, outcome: NodeOutcome, links: Links
) -> list[str]:
    """A stage's plots; of a reused one only if its maker's page, which has them, is gone."""
    if planned.node.stage not in HAVE_CHARTS:
        return []
    maker = links.maker(executor.artifact(planned.node.name))
    if outcome.state is NodeState.DONE or maker is None:
        return plots(executor, planned)
    return [f"The plots are on {linked('the page of the run that made it', maker)}.", ""]


def verdict(manifest: Manifest, *, notes: bool = True) -> list[str]:
    """A comparison's verdict as a list: a benchmark each, and what else is said of it below."""
    lines = []
    for item in manifest.summary["verdicts"]:
        lines.append(f"- **{item['sentence']}**")
        lines += [f"  - {note}" for note in item["notes"]] if notes else []
    return [*lines, ""]


def _words(manifest: Manifest) -> list[str]:
    """The stage's own words."""
    if manifest.stage == "compare":
        return [*verdict(manifest), manifest.markdown.partition("\n")[2].strip(), ""]
    return [without_code_blocks(manifest.markdown), ""]


def _changed_settings(manifest: Manifest) -> list[str]:
    """The settings that differ from the defaults."""
    defaults = {
        name: found.default.model_dump(mode="json")
        for name, found in RunConfig.model_fields.items()
        if name in manifest.config and isinstance(found.default, Section)
    }
    found = changes(defaults, {name: manifest.config[name] for name in defaults})
    if not found:
        return []
    return ["## Settings, where they are not the defaults", "", *(f"- {one}" for one in found), ""]


def _made_from(executor: RunExecutor, inputs: Mapping[str, str], links: Links) -> list[str]:
    """The inputs: what they are, and who made them."""
    rows = []
    for role, name in inputs.items():
        above = executor.plan.named(name)
        artifact = executor.artifact(name)
        summary = {} if artifact is None else artifact.manifest.summary
        link = links.of(name, artifact)
        rows.append(
            (
                role,
                linked(whole(f"{above.node.stage}/{above.key[:KEY_DIGITS]}"), link),
                cell(headline(above.node.stage, summary)),
                made_by(executor, name, links),
            )
        )
    return ["## Made from", "", *table(("input", "artifact", "", "made by"), rows)]


def _failure(executor: RunExecutor, outcome: NodeOutcome) -> list[str]:
    """What went wrong, and the end of the worker's log."""
    lines = [f"**{outcome.state}**: {outcome.message}", ""]
    log = log_file(executor.store, executor.record.run_id, outcome.name)
    if not log.is_file():
        return lines
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return [*lines, f"The end of `{log}`:", "", code(tail), ""]


def shown_artifact(executor: RunExecutor, outcome: NodeOutcome) -> Artifact | None:
    """The artifact that a stage's page tells of; also one whose result forbids what follows."""
    there = outcome.ok or outcome.summary.get("refused")
    return executor.artifact(outcome.name) if there else None


def node_page(
    executor: RunExecutor, planned: PlannedNode, outcome: NodeOutcome, links: Links
) -> str:
    """A node's page."""
    node = planned.node
    lines = [f"# {node.name}", ""]
    artifact = shown_artifact(executor, outcome)
    if artifact is None:
        lines += _failure(executor, outcome)
    else:
        manifest = artifact.manifest
        if not outcome.ok:
            lines += [f"**{outcome.state}**: {outcome.message}", ""]
        if first := headline(node.stage, manifest.summary):
            lines += [f"## {first}", ""]
        lines += [_how(outcome, artifact, links), "", *_bars(artifact)]
        lines += _words(manifest)
        lines += _plots(executor, planned, outcome, links)
    if node.inputs:
        lines += _made_from(executor, node.inputs, links)
    if artifact is not None:
        lines += _changed_settings(artifact.manifest)
    run_id = executor.record.run_id
    lines += links.form("Run this stage again", f"stage/{node.stage}", run=run_id)
    lines += [
        f"{STAGES[node.stage].gist.capitalize()}. `ratchet show {outcome.ref}`, run "
        f"`{run_id}`, code `{planned.code_version}`.",
    ]
    return "\n".join(lines)
