"""What the Prefect UI shows of a run, as Markdown.

Pure text: `flows.full` publishes it. Links lead to the flow runs that made an artifact; an
artifact that was made without Prefect, or whose run's history is gone, is named without a link.
"""

from __future__ import annotations

from typing import Any

from flows.conductor import Conductor, NodeOutcome
from flows.headlines import headline
from flows.terminal import KEY_DIGITS, duration, figure
from ratchet.dag import STAGES
from ratchet.plan import PlannedNode
from ratchet.store.runs import NodeState
from ratchet.store.store import Artifact

RUN_PATH = "/v2/runs/flow-run"
COLOURS = {
    NodeState.DONE: "fill:#d1fae5,stroke:#059669,color:#064e3b",
    NodeState.REUSED: "fill:#e0f2fe,stroke:#0284c7,color:#0c4a6e",
    NodeState.FAILED: "fill:#fee2e2,stroke:#dc2626,color:#7f1d1d",
    NodeState.PENDING: "fill:#f3f4f6,stroke:#9ca3af,color:#374151",
}


def artifact_name(text: str) -> str:
    """A name that Prefect takes for an artifact: lower case, digits and dashes."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")


def _cell(text: str) -> str:
    """Text for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _maker(artifact: Artifact | None) -> str | None:
    """Flow run that made an artifact."""
    return None if artifact is None else artifact.manifest.prefect.get("flow_run_id")


def _linked(text: str, flow_run_id: str | None) -> str:
    return text if flow_run_id is None else f"[{text}]({RUN_PATH}/{flow_run_id})"


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return figure(value)


def _figures(summary: dict[str, Any]) -> list[str]:
    """A table of the summary's plain values."""
    plain = {
        name: value
        for name, value in summary.items()
        if value is None or isinstance(value, str | int | float)
    }
    if not plain:
        return []
    rows = [
        f"| {_cell(name.replace('_', ' '))} | {_cell(_value(value))} |"
        for name, value in plain.items()
    ]
    return ["| figure | value |", "|---|---|", *rows, ""]


def _how(outcome: NodeOutcome, artifact: Artifact | None, run_id: str) -> str:
    """One sentence: built or reused, by whom."""
    if outcome.state is NodeState.FAILED or artifact is None:
        return f"**{outcome.state}**: {outcome.message}"
    manifest = artifact.manifest
    if outcome.state is NodeState.DONE:
        return f"**built** in {duration(manifest.duration_seconds)} on {manifest.device}"
    made = _linked(f"run `{manifest.run_id}`", _maker(artifact))
    return f"**reused**: made by {made} on {manifest.started_at[:16].replace('T', ' ')} UTC"


def node_page(conductor: Conductor, planned: PlannedNode, outcome: NodeOutcome) -> str:
    """A node's page: figures, the stage's own words, inputs."""
    node = planned.node
    artifact = conductor.artifact(node.name) if outcome.ok else None
    lines = [f"# {node.name}", "", f"{STAGES[node.stage].gist.capitalize()}.", ""]
    lines += [_how(outcome, artifact, conductor.record.run_id), ""]
    if artifact is not None:
        lines += _figures(artifact.manifest.summary)
        if artifact.manifest.markdown:
            lines += [artifact.manifest.markdown, ""]
    if node.inputs:
        lines += ["## Made from", ""]
        for role, name in node.inputs.items():
            above = conductor.plan.named(name)
            made = _linked(
                f"{above.node.stage}/{above.key[:KEY_DIGITS]}", _maker(conductor.artifact(name))
            )
            lines.append(f"- {role}: {made}")
        lines.append("")
    lines += [
        f"`ratchet show {outcome.ref}` · run `{conductor.record.run_id}` · "
        f"code {planned.code_version}",
    ]
    return "\n".join(lines)


def drawn_inputs(planned: PlannedNode) -> dict[str, str]:
    """The inputs of a node that pictures show; the report's are everything and would hide the
    pipeline, so only the last before it is kept."""
    inputs = planned.node.inputs
    return {"compare": inputs["compare"]} if planned.node.stage == "report" else inputs


def _mermaid(conductor: Conductor) -> list[str]:
    ids = {planned.node.name: f"n{index}" for index, planned in enumerate(conductor.needed)}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"  classDef {state} {colour}" for state, colour in COLOURS.items()]
    for planned in conductor.needed:
        name = planned.node.name
        outcome = conductor.outcomes.get(name)
        state = NodeState.PENDING if outcome is None else outcome.state
        lines.append(f'  {ids[name]}["{name}<br/>{planned.key[:KEY_DIGITS]}"]:::{state}')
        lines += [f"  {ids[above]} --> {ids[name]}" for above in drawn_inputs(planned).values()]
        if (maker := _maker(conductor.artifact(name))) is not None:
            lines.append(f'  click {ids[name]} "{RUN_PATH}/{maker}"')
    return [*lines, "```"]


def _lineage_row(conductor: Conductor, planned: PlannedNode) -> str:
    name = planned.node.name
    outcome = conductor.outcomes.get(name)
    artifact = conductor.artifact(name)
    state = "pending" if outcome is None else outcome.state.value
    made_by, took, figures = "", "", ""
    if artifact is not None:
        figures = _cell(headline(planned.node.stage, artifact.manifest.summary))
        run_id = artifact.manifest.run_id
        made_by = _linked(
            "this run" if run_id == conductor.record.run_id else run_id, _maker(artifact)
        )
        took = duration(artifact.manifest.duration_seconds)
    inputs = list(planned.node.inputs)
    source = "everything" if len(inputs) > 5 else ", ".join(planned.node.inputs.values())
    key = planned.key[:KEY_DIGITS]
    return f"| {name} | {state} | `{key}` | {figures} | {source} | {made_by} | {took} |"


def run_page(conductor: Conductor, verdict: str) -> str:
    """The run's page: the verdict, the lineage as a picture and as a table."""
    record = conductor.record
    lines = [f"# {record.name}", ""]
    if verdict:
        lines += ["**Verdict**", "", *(f"- {part}" for part in verdict.split(" | ")), ""]
    failed = [outcome for outcome in conductor.outcomes.values() if not outcome.ok]
    lines += [f"**{outcome.name} failed**: {outcome.message}\n" for outcome in failed]
    lines += [f"Run `{record.run_id}`, asked for by `{record.command}`.", ""]
    if record.based_on is not None:
        lines += [f"Settings taken from run `{record.based_on}`.", ""]
    lines += _mermaid(conductor)
    compared = conductor.artifact("compare") if "compare" in conductor.outcomes else None
    if compared is not None:
        lines += ["", compared.manifest.markdown.removeprefix(f"**{verdict}**")]
    lines += [
        "",
        "| stage | state | key | figure | from | made by run | took |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_lineage_row(conductor, planned) for planned in conductor.needed]
    lines += ["", f"`ratchet show {record.run_id}` · `ratchet lineage {record.run_id}`"]
    return "\n".join(lines)
