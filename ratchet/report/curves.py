"""Figures of training: what each step logged, drawn where it was logged.

Our own columns are preferred and TRL's are used where they are missing. Faint lines are the steps
themselves, strong ones a moving average over a tenth of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratchet.report.figures import (
    BAND,
    BASE,
    INK,
    MUTED,
    RL,
    SECOND,
    WARM,
    Chart,
    as_percent,
    drawing,
    quiet,
    smooth,
    to_svg,
)
from ratchet.report.gather import Gathered, Row
from ratchet.words import percent, small

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDGE_SHARE = 0.1  # of the steps, averaged at either end for the titles
WHOLE = (0.0, 1.02)
Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Panel:
    """Lines over the steps that share their axes."""

    lines: Sequence[tuple[Series, str, str | None]]
    """Each with its colour and its name in the legend."""
    title: str = ""
    y_label: str = ""
    limits: tuple[float, float] | None = None
    """Of the vertical axis; None for what the lines need."""
    percent: bool = False
    end: str = ""
    """Written where the first line ends."""
    guard: float | None = None
    """End of the drift guard's band: lines as they were logged, on a log scale."""


def series(rows: Sequence[Row], *names: str) -> Series | None:
    """(steps, values) of the first column that was logged; None when none was."""
    for name in names:
        found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if found:
            return [step for step, _ in found], [float(value) for _, value in found]
    return None


def edges(values: list[float]) -> tuple[float, float]:
    """Means over the first and the last tenth."""
    width = max(1, round(len(values) * EDGE_SHARE))
    return sum(values[:width]) / width, sum(values[-width:]) / width


def reward_names(rows: Sequence[Row]) -> list[str]:
    """Reward functions with a logged mean, in the table's order."""
    found = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return [
        name.removeprefix("rewards/").removesuffix("/mean")
        for name in found
        if name.startswith("rewards/") and name.endswith("/mean")
    ]


def _draw(name: str, panels: list[Panel], columns: int = 1, row_inches: float = 1.95) -> str:
    """SVG of panels over the steps, row by row."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with drawing(0.35 + row_inches * rows, rows, columns) as (figure, grid):
        all_axes: list[Axes] = [grid] if rows * columns == 1 else list(grid.flat)
        for axes, panel in zip(all_axes, panels, strict=False):
            _draw_panel(axes, panel)
            if len(panels) > 1:
                axes.locator_params(axis="y", nbins=3 if columns > 1 else 4)
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
        if columns == 1:
            all_axes[-1].set_xlabel("step")
        else:
            figure.supxlabel("step", color=MUTED, fontsize=9)
        return to_svg(figure, name)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for (steps, logged), colour, label in panel.lines:
        values = logged if panel.guard else smooth(logged)
        if not panel.guard:
            axes.plot(steps, logged, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, values, color=colour, label=label)
        if panel.end:
            axes.annotate(
                panel.end, (steps[-1], values[-1]), xytext=(4, 0), textcoords="offset points",
                va="center", color=INK, fontsize=9, annotation_clip=False,
            )  # fmt: skip
    if panel.guard:
        axes.axhspan(0, panel.guard, color=BAND, linewidth=0, zorder=0)
        axes.axhline(panel.guard, color=WARM, linewidth=1.0, linestyle=(0, (4, 3)))
        if panel.limits:
            axes.set_yscale("log")
            axes.minorticks_off()
    axes.locator_params(axis="x", integer=True)
    axes.set_title(panel.title, fontsize=8.5)
    axes.set_ylabel(panel.y_label)
    axes.set_ylim(panel.limits)
    if panel.percent:
        as_percent(axes.yaxis)
    quiet(axes)
    if len(panel.lines) > 1:
        axes.legend(ncols=2)


def _from_zero(values: list[float]) -> tuple[float, float]:
    """Limits that show a line at zero and leave room above."""
    top = max(0.05, *values)
    return min(0.0, *values) - 0.02 * top, 1.12 * top


def rewards(data: Gathered) -> Chart | None:
    """Mean of every reward function over training, a panel each."""
    weights = data.reward_weights
    panels, moved = [], {}
    for name in reward_names(data.grpo_metrics):
        found = series(data.grpo_metrics, f"rewards/{name}/mean")
        assert found is not None
        start, end = edges(found[1])
        moved[name] = end - start
        title = f"{name} × {weights[name]:g}" if name in weights else name
        panels.append(
            Panel([(found, RL, None)], title, limits=_from_zero(found[1]), end=f"{end:.2f}")
        )
    if not panels:
        return None
    most = max(moved, key=lambda name: moved[name])
    title = "No reward rises"
    if moved[most] > 0:
        title = f"Of the rewards, {most} rises most ({moved[most]:+.2f})"
    if fallen := [name for name, change in moved.items() if change < -0.02]:
        title += f"; {', '.join(fallen)} fell"
    caption = (
        "Mean of each reward function per step, before its weight. The number is the mean over the "
        "last tenth of the steps."
    )
    return Chart(title, _draw("rewards", panels, columns=2, row_inches=1.15), caption)


def total_reward(data: Gathered) -> Chart | None:
    """Weighted total reward over training."""
    found = series(data.grpo_metrics, "reward")
    if found is None:
        return None
    start, end = edges(found[1])
    verb = "rises" if end > start else "does not rise:"
    return Chart(
        f"The total reward {verb} from {start:.2f} to {end:.2f}",
        _draw("total-reward", [Panel([(found, RL, None)], y_label="weighted total")]),
        "Mean total reward of the completions of a step.",
    )


def accuracy(data: Gathered) -> Chart | None:
    """Strict and lenient accuracy on the training questions."""
    strict, lenient = (series(data.grpo_metrics, name) for name in ("strict", "lenient"))
    if strict is None or lenient is None:
        return None
    lines = [(lenient, SECOND, "lenient"), (strict, RL, "strict")]
    by_strict, by_lenient = (
        " to ".join(percent(share, 0) for share in edges(values)) for _, values in (strict, lenient)
    )
    return Chart(
        f"On the training questions strict accuracy goes from {by_strict}, lenient from "
        f"{by_lenient}",
        _draw("accuracy", [Panel(lines, limits=WHOLE, percent=True)]),
        "Share of a step's sampled completions that are right.",
    )


def live_groups(data: Gathered) -> Chart | None:
    """Share of groups whose rewards differ."""
    found = series(data.grpo_metrics, "live_share")
    if found is None:
        flat = series(data.grpo_metrics, "frac_reward_zero_std")
        if flat is None:
            return None
        found = flat[0], [1 - value for value in flat[1]]
    start, end = edges(found[1])
    return Chart(
        f"{percent(start, 0)} of the groups are live at the start, {percent(end, 0)} at the end",
        _draw("live-groups", [Panel([(found, RL, None)], limits=WHOLE, percent=True)]),
        "Share of groups whose total rewards differ; the others give no gradient.",
    )


def drift(data: Gathered) -> Chart | None:
    """Distance between sampler and trainer, with its guard band; None where nothing is logged."""
    found = series(data.grpo_metrics, "drift_mean", "sampling/sampling_logp_difference/mean")
    if found is None:
        return None
    peak = series(data.grpo_metrics, "drift_max", "sampling/sampling_logp_difference/max")
    steps, values = found
    limit, halt = data.drift_limits(values[0])
    lines = [(found, RL, "mean")] + ([(peak, BASE, "largest")] if peak else [])
    drawn = [value for line, *_ in lines for value in line[1] if value > 0]
    limits = (min(drawn) / 3, max(limit, *drawn) * 4) if drawn else None
    outside = [step for step, value in zip(steps, values, strict=True) if value > limit]
    mean = small(sum(values) / len(values))
    title = f"Sampler and trainer agree to {mean} nats per token, inside the guard band"
    if outside:
        title = (
            f"Sampler and trainer drift apart: {len(outside)} of {len(steps)} steps leave the "
            f"guard band, the first at step {outside[0]}"
        )
    caption = (
        f"Mean |log p(sampler) − log p(trainer)| per sampled token. The band ends at "
        f"{small(limit)}, measured from step 1; at {small(halt)} training halts."
    )
    panel = Panel(lines, y_label="nats per token", limits=limits, guard=limit)
    return Chart(title, _draw("drift", [panel]), caption)


def lengths(data: Gathered) -> Chart | None:
    """Completion length and share of cut-off completions."""
    tokens = series(data.grpo_metrics, "mean_tokens", "completions/mean_length")
    cut = series(data.grpo_metrics, "truncated_share", "completions/clipped_ratio")
    if tokens is None or cut is None:
        return None
    (start, end), (_, cut_end) = edges(tokens[1]), edges(cut[1])
    above = Panel([(tokens, RL, None)], "tokens per completion", limits=_from_zero(tokens[1]))
    below = Panel(
        [(cut, WARM, None)], "cut off at the limit", limits=_from_zero(cut[1]), percent=True
    )
    return Chart(
        f"Completions go from {start:.0f} to {end:.0f} tokens; {percent(cut_end)} are cut off at "
        "the end",
        _draw("lengths", [above, below], row_inches=1.3),
        "Mean length per step, and the share that ran into the token limit.",
    )


def warmstart_loss(data: Gathered) -> Chart | None:
    """Loss of the warm start, and what the dev questions said of its checkpoints."""
    found = series(data.warmstart_metrics, "loss")
    if found is None:
        return None
    start, end = edges(found[1])
    opd = data.warmstart_stage == "warmstart_opd"
    name = "Distillation" if opd else "Fine-tuning"
    what = "Divergence from the teacher" if opd else "Cross-entropy on the answer's tokens"
    chosen = ""
    if checked := series(data.warmstart_metrics, "dev_strict"):
        summary = data.manifests["warmstart"].summary
        chosen = (
            f" Of {len(checked[0])} checkpoints that of step {summary['best_step']} was kept, with "
            f"{percent(summary['dev_strict_best'])} of the dev questions strictly right (the "
            f"first: {percent(checked[1][0])}, the last: {percent(checked[1][-1])})."
        )
    panel = Panel([(found, WARM, None)], y_label="nats per token", limits=_from_zero(found[1]))
    return Chart(
        f"{name}: the loss goes from {start:.2f} to {end:.2f} in {len(found[0])} steps",
        _draw("warmstart-loss", [panel]),
        f"{what} per step.{chosen}",
    )
