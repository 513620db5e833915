"""What the Prefect UI shows of a whole run, as Markdown: the verdict, then the lineage.

The lineage is a picture (mermaid) and a table; each stage in them leads to the flow run that made
its artifact, also when an earlier run did. The page is published when the run starts and brought up
to date as stages end.
"""

from __future__ import annotations

from flows.execution.executor import RunExecutor
from flows.execution.terminal import KEY_DIGITS, duration
from flows.pages.markdown import cell, linked, run_address, table, whole
from flows.pages.stage_page import Links, made_by, plots, verdict
from ratchet.config.run import RunConfig
from ratchet.pipeline.dag import CLEAN
from ratchet.pipeline.plan import PlannedNode
from ratchet.report.headlines import headline, label
from ratchet.store.runs import NodeState

COLOURS = {
    NodeState.DONE: "fill:#d1fae5,stroke:#059669,color:#064e3b",
    NodeState.REUSED: "fill:#e0f2fe,stroke:#0284c7,color:#0c4a6e",
    NodeState.FAILED: "fill:#fee2e2,stroke:#dc2626,color:#7f1d1d",
    NodeState.RUNNING: "fill:#fef3c7,stroke:#d97706,color:#78350f",
    NodeState.PENDING: "fill:#f3f4f6,stroke:#9ca3af,color:#374151",
}
LEGEND = (
    "Green was made by this run, blue reused from an earlier one, yellow is running, red failed, "
    "grey is still to come. A stage leads to the run that made it. The questions go into every "
    "stage; a line is drawn to the first ones."
)
LAYOUT = '%%{init: {"flowchart": {"nodeSpacing": 24, "rankSpacing": 30, "padding": 10}}}%%'


def model_name(config: RunConfig) -> str:
    """The model's name without its owner or folder."""
    return config.model.path.rstrip("/").rpartition("/")[2]


def what_it_does(config: RunConfig) -> str:
    """A run in a few words: 'grpo on Qwen3-0.6B after sft'."""
    method = config.warmstart.method
    after = "" if method == "none" else f" after {method}"
    return f"{config.grpo.algorithm} on {model_name(config)}{after}"


def drawn_inputs(planned: PlannedNode) -> dict[str, str]:
    """The nodes that the run graph draws an arrow from, by role: the inputs, and what has to come
    before. The report's inputs are everything and would hide the pipeline, so only the last is
    kept."""
    inputs = planned.node.inputs
    if planned.node.stage == "report":
        return {"compare": inputs["compare"]}
    return inputs | {name: name for name in planned.node.after}


def _lines_into(planned: PlannedNode) -> list[str]:
    """Nodes that the lineage's picture draws a line from: not the questions where another input
    was itself made from them."""
    names = list(drawn_inputs(planned).values())
    others = [name for name in names if name not in ("questions", CLEAN, "model")]
    return [name for name in names if name not in ("questions", CLEAN)] if others else names


def _state(executor: RunExecutor, links: Links, name: str) -> NodeState:
    outcome = executor.outcomes.get(name)
    if outcome is not None:
        return outcome.state
    return NodeState.RUNNING if name in links.here else NodeState.PENDING


def summary_line(executor: RunExecutor, links: Links) -> str:
    """The verdict, or where the run is, in one line of plain text."""
    if verdict := executor.verdict():
        return verdict.partition("; ")[0].partition(" | ")[0]
    names = [planned.node.name for planned in executor.needed]
    there = sum(outcome.ok for outcome in executor.outcomes.values())
    count = f"{there} of {len(names)} stages are there"
    for name in names:
        state = _state(executor, links, name)
        if state is NodeState.FAILED:
            return f"{name} failed; {count}"
        if state is NodeState.RUNNING:
            return f"{name} is running; {count}"
    return count


def _text(text: str) -> str:
    """Text for a mermaid node."""
    for character, entity in (("&", "amp"), ('"', "quot"), ("<", "lt"), (">", "gt")):
        text = text.replace(character, f"#{entity};")
    return text


def _mermaid(executor: RunExecutor, links: Links) -> list[str]:
    ids = {planned.node.name: f"n{index}" for index, planned in enumerate(executor.needed)}
    lines = ["```mermaid", LAYOUT, "flowchart TD"]
    lines += [f"  classDef {state} {colour}" for state, colour in COLOURS.items()]
    lines.append("  linkStyle default stroke:#94a3b8")
    for planned in executor.needed:
        name, stage = planned.node.name, planned.node.stage
        artifact = executor.artifact(name)
        state = _state(executor, links, name)
        shown = [f"<b>{_text(name)}</b>"]
        if artifact is not None and state in (NodeState.DONE, NodeState.REUSED):
            shown.append(_text(label(stage, artifact.manifest.summary)))
        words = "<br/>".join(filter(None, shown))
        lines.append(f'  {ids[name]}["{words}"]:::{state}')
        lines += [f"  {ids[above]} --> {ids[name]}" for above in _lines_into(planned)]
        if (shows := links.of(name, artifact)) is not None:
            lines.append(f'  click {ids[name]} "{run_address(shows)}"')
    return [*lines, "```", "", f"*{LEGEND}*", ""]


def _row(executor: RunExecutor, planned: PlannedNode, links: Links) -> tuple[str, ...]:
    name = planned.node.name
    artifact = executor.artifact(name)
    state = _state(executor, links, name)
    link = links.of(name, artifact)
    inputs = list(planned.node.inputs.values())
    source = "everything" if len(inputs) > 5 else ", ".join(inputs)
    who, figures = f"**{state}**", ""
    if artifact is not None and state in (NodeState.DONE, NodeState.REUSED):
        figures = cell(headline(planned.node.stage, artifact.manifest.summary))
        took = whole(duration(artifact.manifest.duration_seconds))
        who = f"{made_by(executor, name, links)}, {took}"
    key = f"`{planned.key[:KEY_DIGITS]}`"
    return f"{linked(f'**{name}**', link)} {key}", figures, source, who


def _lineage(executor: RunExecutor, links: Links) -> list[str]:
    rows = [_row(executor, planned, links) for planned in executor.needed]
    return [
        "## Lineage",
        "",
        *_mermaid(executor, links),
        *table(("stage", "figures", "made from", "made by"), rows),
    ]


def _stale(executor: RunExecutor) -> list[str]:
    """Stages of the run that weren't asked for and no longer fit."""
    needed = {planned.node.name for planned in executor.needed}
    stale = [
        planned.node.name
        for planned in executor.plan.nodes
        if planned.node.name not in needed and planned.state == "run"
    ]
    if not stale:
        return []
    return [
        f"**Stale** until they run again: {', '.join(stale)} "
        f"(`ratchet run --run {executor.record.run_id}`).",
        "",
    ]


def _comparison(executor: RunExecutor) -> list[str]:
    """The forest plot and the comparison's tables, where the run went that far."""
    outcome = executor.outcomes.get("compare")
    artifact = executor.artifact("compare")
    if outcome is None or not outcome.ok or artifact is None:
        return []
    drawn = plots(executor, executor.plan.named("compare"))
    words = artifact.manifest.markdown.partition("\n")[2].strip()  # after the verdict
    return ["## Comparison", "", *verdict(artifact.manifest), *drawn, words, ""]


def run_page(executor: RunExecutor, links: Links) -> str:
    """The run's page: the verdict or where the run is, the lineage, the comparison."""
    record = executor.record
    lines = [f"# {record.name}: {what_it_does(executor.config)}", ""]
    compared = executor.artifact("compare") if executor.verdict() else None
    if compared is not None:
        lines += ["**Verdict**", "", *verdict(compared.manifest, notes=False)]
    else:
        lines += [f"{summary_line(executor, links)}.", ""]
    failed = [outcome for outcome in executor.outcomes.values() if not outcome.ok]
    lines += [f"**{outcome.name} failed**: {outcome.message}\n" for outcome in failed]
    lines += _stale(executor)
    lines += _lineage(executor, links)
    lines += _comparison(executor)
    lines += links.form("Start a run like this one", "full/full", start_from=record.run_id)
    based_on = "" if record.based_on is None else f"; settings taken from run `{record.based_on}`"
    lines += [
        f"Run `{record.run_id}`, asked for by `{record.command}`{based_on}. "
        f"`ratchet show {record.run_id}`, `ratchet lineage {record.run_id}`, "
        f"`ratchet report {record.run_id}` tell more.",
    ]
    return "\n".join(lines)
