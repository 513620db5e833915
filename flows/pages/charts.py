"""A stage's plots for the Prefect UI: the report's own figures, put into Markdown.

The UI drops `data:` images from Markdown, but it draws mermaid, and a mermaid node may be a picture
with a `data:` address. So a plot is a diagram with one such node. Colours are the report's light
ones on its paper, which can be read in both themes of the UI.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from ratchet.pipeline.stages import STAGES
from ratchet.report.templates import standalone
from ratchet.store.manifest import read_manifest
from ratchet.store.store import Artifact

if TYPE_CHECKING:
    from ratchet.report.figures import Chart

WIDTH = 640
"""Of a plot in CSS pixels, as wide as the UI's text."""
MERMAID_CHARACTERS = 50_000
"""Mermaid refuses longer diagrams."""


def charts(stage: str, inputs: Mapping[str, Artifact]) -> list[Chart]:
    """The plots of a stage.

    `inputs` holds its artifact under its node's name, and the warm start's, which names a variant.
    """
    named = STAGES[stage].charts
    if not named:  # without loading matplotlib
        return []
    from ratchet.report.gather import gather

    data = gather(inputs, run_id="")
    found = (resolve_name(name)(data) for name in named)
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
