"""How figures look: one style, drawn by matplotlib, themed by the page.

Figures are inline SVG. Colours are drawn as marker values and then replaced by the page's CSS
variables, and text stays text in the page's font, so one figure serves light and dark pages and
scales with the reader's screen. Figures are narrow because phones are. matplotlib is imported
inside the functions; no global state of it is touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Marker colour → CSS variable. The values only matter in that no figure would use them by chance.
INK, MUTED, RULE, PAPER = "#010a01", "#010a02", "#010a03", "#010a04"
BASE, WARM, RL, SECOND, BAND = "#010a05", "#010a06", "#010a07", "#010a08", "#010a09"
OTHERS = ("#010a0a", "#010a0b", "#010a0c", "#010a0d")
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    RULE: "--rule",
    PAPER: "--paper",
    BASE: "--variant-baseline",
    WARM: "--variant-warmstart",
    RL: "--variant-rl",
    SECOND: "--second",
    BAND: "--band",
} | {colour: f"--variant-other-{index}" for index, colour in enumerate(OTHERS)}
OWN_COLOURS = {"baseline": BASE, "warmstart": WARM, "rl": RL}
WIDTH_INCHES = 4.7
STYLE = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
}


@dataclass(frozen=True)
class Chart:
    """A figure as the page shows it."""

    title: str
    """The finding, one sentence."""
    svg: str
    caption: str
    """What is drawn, with units."""


def colour_of(variant: str, variants: Sequence[str]) -> str:
    """A variant's colour: the run's own have theirs, others one each while they last."""
    others = [one for one in variants if one not in OWN_COLOURS]
    return OWN_COLOURS.get(variant) or OTHERS[others.index(variant) % len(OTHERS)]


def legend_above(figure: Figure, axes: Axes) -> None:
    """The axes' labels in rows above the picture, however many there are."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, handletextpad=0.3)


@contextmanager
def drawing(height_inches: float, rows: int = 1, columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    """A figure in our style and its axes (an array when there are several)."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height_inches))
        yield figure, figure.subplots(rows, columns)


def quiet(axes: Axes, grid: str = "y") -> None:
    """Grid along one axis only, no tick marks, no spine across the grid."""
    axes.tick_params(length=0)
    axes.grid(visible=False, axis="x" if grid == "y" else "y")
    axes.spines["left" if grid == "y" else "bottom"].set_visible(False)


def as_percent(axis: Any) -> None:
    """Label an axis of shares in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for an HTML page; `name` keeps its ids apart from others'."""
    import matplotlib as mpl

    out = StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None, "matplotlib writes a viewBox"
    text = f'<svg {box[0]} class="plot" role="img" aria-label="{name}">{rest}'
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("'DejaVu Sans'", "var(--sans)").rstrip()


def smooth(values: list[float], share: float = 0.1) -> list[float]:
    """Centred moving average over a share of the points, shorter at the ends."""
    half = max(1, round(len(values) * share)) // 2
    return [
        sum(window) / len(window)
        for i in range(len(values))
        for window in [values[max(0, i - half) : i + half + 1]]
    ]
