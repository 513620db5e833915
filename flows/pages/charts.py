"""A stage's plots for the Prefect UI: the report's own figures, put into Markdown.

The UI drops `data:` images from Markdown, but it draws mermaid, and a mermaid node may be a picture
with a `data:` address. So a plot is a diagram with one such node. Colours are the report's light
ones on its paper, which can be read in both themes of the UI.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.report.templates import standalone
from ratchet.store.manifest import read_manifest
from ratchet.store.store import Artifact

if TYPE_CHECKING:
    from ratchet.report.figures import Chart
    from ratchet.report.gather import Gathered

WIDTH = 640
"""Of a plot in CSS pixels, as wide as the UI's text."""
MERMAID_CHARACTERS = 50_000
"""Mermaid refuses longer diagrams."""


def _gathered(inputs: Mapping[str, Artifact]) -> Gathered:
    """What the report's figures read, as far as these artifacts (by node name) hold it."""
    from ratchet.report.gather import Gathered

    def rows(node: str, table: str) -> list[dict]:
        found = inputs.get(node)
        return [] if found is None else found.table(table).to_pylist()

    def summary(node: str) -> dict:
        found = inputs.get(node)
        return {} if found is None else found.manifest.summary

    return Gathered(
        run_id="",
        manifests={name: artifact.manifest for name, artifact in inputs.items()},
        compared=rows("compare", "comparison"),
        summary=summary("compare"),
        flips=[],
        selection=summary("filter"),
        contaminated=[],
        rollouts=None,
        benchmark=rows("benchmark", "benchmark"),
        benchmark_words=[],
        warmstart_metrics=rows("warmstart", "metrics"),
        grpo_metrics=rows("grpo", "metrics"),
        ledger=[],
    )


def _drawers(stage: str) -> list[Callable[[Gathered], Chart | None]]:
    from ratchet.report import curves, plots

    drawers: dict[str, list[Callable[[Gathered], Chart | None]]] = {
        "filter": [plots.pass_rates],
        "warmstart_sft": [curves.warmstart_loss],
        "warmstart_opd": [curves.warmstart_loss],
        "grpo": [curves.total_reward, curves.accuracy, curves.live_groups, curves.drift],
        "compare": [plots.forest, plots.by_band],
    }
    return drawers.get(stage, [])


HAVE_CHARTS = ("filter", "warmstart_sft", "warmstart_opd", "grpo", "compare")
"""Stages with plots; the others need no matplotlib."""


def charts(stage: str, inputs: Mapping[str, Artifact]) -> list[Chart]:
    """The plots of a stage.

    `inputs` holds its artifact under its node's name, and for the comparison the warm start's,
    which names an arm.
    """
    if stage not in HAVE_CHARTS:
        return []
    data = _gathered(inputs)
    found = (draw(data) for draw in _drawers(stage))
    return [chart for chart in found if chart is not None]


@lru_cache(maxsize=16)
def _drawn(stage: str, artifacts: tuple[tuple[str, Path, str], ...]) -> tuple[str, ...]:
    """Plots of the artifacts (node, folder, content hash), drawn once a process."""
    inputs = {}
    for node, folder, _ in artifacts:
        manifest = read_manifest(folder)
        assert manifest is not None
        inputs[node] = Artifact(folder, manifest)
    try:
        return tuple(line for chart in charts(stage, inputs) for line in in_markdown(chart))
    # An artifact of older code may lack a figure; its page has others.
    except (LookupError, TypeError, ValueError) as error:
        return (f"*The plots can't be drawn: {type(error).__name__}: {error}*", "")


def drawn(stage: str, inputs: Mapping[str, Artifact]) -> list[str]:
    """Lines that show a stage's plots; `inputs` as `charts` takes them."""
    found = ((node, item.folder, item.manifest.content) for node, item in inputs.items())
    return list(_drawn(stage, tuple(found)))


def in_markdown(chart: Chart) -> list[str]:
    """Lines that show a plot with its finding above and its caption below."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', chart.svg)
    assert box is not None, "the report's figures have a viewBox"
    height = round(WIDTH * float(box[2]) / float(box[1]))
    data = base64.b64encode(standalone(chart.svg).encode()).decode()
    drawing = [
        "flowchart LR",
        f'  plot@{{ img: "data:image/svg+xml;base64,{data}", label: "", w: {WIDTH}, '
        f'h: {height}, constraint: "on" }}',
    ]
    if sum(map(len, drawing)) > MERMAID_CHARACTERS:
        return [f"**{chart.title}** (the plot is too large for this page; the report has it)", ""]
    return [f"**{chart.title}**", "", "```mermaid", *drawing, "```", "", f"*{chart.caption}*", ""]
