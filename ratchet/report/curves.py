"""Figures of training: what each step logged, drawn where it was logged.

Our own columns are preferred and TRL's are used where they are missing. Faint lines are the steps
themselves, strong ones a moving average over a tenth of them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from ratchet.report.words import percent, small

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDGE_SHARE = 0.1  # of the steps, averaged at either end for the titles
Series = tuple[list[int], list[float]]


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


def _curve(axes: Axes, found: Series, colour: str, label: str | None = None) -> None:
    steps, values = found
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(values), color=colour, label=label)
    axes.locator_params(axis="x", integer=True)


def reward_names(rows: Sequence[Row]) -> list[str]:
    """Reward functions with a logged mean, in the table's order."""
    found = (name for row in rows for name, value in row.items() if value is not None)
    return [
        name.removeprefix("rewards/").removesuffix("/mean")
        for name in dict.fromkeys(found)
        if name.startswith("rewards/") and name.endswith("/mean")
    ]


def _ends_at(axes: Axes, found: Series, colour: str, text: str) -> None:
    """The last value, written where the line ends."""
    steps, values = found
    axes.annotate(
        text,
        (steps[-1], smooth(values)[-1]),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontsize=9,
        annotation_clip=False,
    )


def rewards(data: Gathered) -> Chart | None:
    """Mean of every reward function over training, a panel each."""
    names = reward_names(data.grpo_metrics)
    if not names:
        return None
    weights = data.reward_weights
    rows = -(-len(names) // 2)
    moved: dict[str, float] = {}
    with drawing(0.35 + 1.15 * rows, rows, 2 if len(names) > 1 else 1) as (figure, grid):
        panels = [grid] if len(names) == 1 else list(grid.flat)
        for panel, name in zip(panels, names, strict=False):
            found = series(data.grpo_metrics, f"rewards/{name}/mean")
            assert found is not None
            _curve(panel, found, RL)
            start, end = edges(found[1])
            moved[name] = end - start
            weight = f" × {weights[name]:g}" if name in weights else ""
            panel.set_title(f"{name}{weight}", fontsize=8.5)
            _ends_at(panel, found, INK, f"{end:.2f}")
            panel.set_ylim(min(0.0, *found[1]) - 0.02, max(found[1]) * 1.12 + 0.02)
            panel.locator_params(axis="y", nbins=3)
            quiet(panel)
        for panel in panels[len(names) :]:
            panel.set_axis_off()
        figure.supxlabel("step", color=MUTED, fontsize=9)
        svg = to_svg(figure, "rewards")
    most = max(moved, key=lambda name: moved[name])
    title = (
        f"Of the rewards, {most} rises most ({moved[most]:+.2f})"
        if moved[most] > 0
        else "No reward rises"
    )
    fallen = [name for name, change in moved.items() if change < -0.02]
    if fallen:
        title += f"; {', '.join(fallen)} fell"
    caption = (
        "Mean of each reward function per step, before its weight. The number is the mean over the "
        "last tenth of the steps."
    )
    return Chart(title, svg, caption)


def total_reward(data: Gathered) -> Chart | None:
    """Weighted total reward over training."""
    found = series(data.grpo_metrics, "reward")
    if found is None:
        return None
    start, end = edges(found[1])
    with drawing(2.3) as (figure, axes):
        _curve(axes, found, RL)
        axes.set_xlabel("step")
        axes.set_ylabel("weighted total")
        quiet(axes)
        svg = to_svg(figure, "total-reward")
    verb = "rises" if end > start else "does not rise:"
    title = f"The total reward {verb} from {start:.2f} to {end:.2f}"
    return Chart(title, svg, "Mean total reward of the completions of a step.")


def accuracy(data: Gathered) -> Chart | None:
    """Strict and lenient accuracy on the training questions."""
    strict, lenient = (series(data.grpo_metrics, name) for name in ("strict", "lenient"))
    if strict is None or lenient is None:
        return None
    with drawing(2.3) as (figure, axes):
        _curve(axes, lenient, SECOND, "lenient")
        _curve(axes, strict, RL, "strict")
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.02)
        as_percent(axes.yaxis)
        quiet(axes)
        axes.legend(loc="lower right")
        svg = to_svg(figure, "accuracy")
    (strict_start, strict_end), (start, end) = edges(strict[1]), edges(lenient[1])
    title = (
        f"On the training questions strict accuracy goes from {percent(strict_start, 0)} to "
        f"{percent(strict_end, 0)}, lenient from {percent(start, 0)} to {percent(end, 0)}"
    )
    return Chart(title, svg, "Share of a step's sampled completions that are right.")


def live_groups(data: Gathered) -> Chart | None:
    """Share of groups whose rewards differ."""
    found = series(data.grpo_metrics, "live_share")
    if found is None:
        flat = series(data.grpo_metrics, "frac_reward_zero_std")
        if flat is None:
            return None
        found = flat[0], [1 - value for value in flat[1]]
    start, end = edges(found[1])
    with drawing(2.3) as (figure, axes):
        _curve(axes, found, RL)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.02)
        as_percent(axes.yaxis)
        quiet(axes)
        svg = to_svg(figure, "live-groups")
    title = f"{percent(start, 0)} of the groups are live at the start, {percent(end, 0)} at the end"
    caption = "Share of groups whose total rewards differ; the others give no gradient."
    return Chart(title, svg, caption)


def drift(data: Gathered) -> Chart | None:
    """Distance between sampler and trainer, with its guard band; None where nothing is logged."""
    found = series(data.grpo_metrics, "drift_mean", "sampling/sampling_logp_difference/mean")
    if found is None:
        return None
    peak = series(data.grpo_metrics, "drift_max", "sampling/sampling_logp_difference/max")
    limit, halt = data.drift_limits(found[1][0])
    with drawing(2.3) as (figure, axes):
        axes.axhspan(0, limit, color=BAND, linewidth=0)
        axes.axhline(limit, color=WARM, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.plot(*found, color=RL, label="mean")
        if peak is not None:
            axes.plot(*peak, color=BASE, linewidth=1.2, label="largest")
            axes.legend(loc="upper right", ncols=2)
        drawn = [v for v in found[1] + (peak[1] if peak else []) if v > 0]
        if drawn:
            axes.set_yscale("log")
            axes.set_ylim(min(drawn) / 3, max([limit, *drawn]) * 4)
            axes.minorticks_off()
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token")
        quiet(axes)
        svg = to_svg(figure, "drift")
    outside = [step for step, value in zip(*found, strict=True) if value > limit]
    mean = sum(found[1]) / len(found[1])
    if outside:
        title = (
            f"Sampler and trainer drift apart: {len(outside)} of {len(found[0])} steps leave the "
            f"guard band, the first at step {outside[0]}"
        )
    else:
        title = f"Sampler and trainer agree to {small(mean)} nats per token, inside the guard band"
    caption = (
        f"Mean |log p(sampler) − log p(trainer)| per sampled token. The band ends at "
        f"{small(limit)}, measured from step 1; at {small(halt)} training halts."
    )
    return Chart(title, svg, caption)


def lengths(data: Gathered) -> Chart | None:
    """Completion length and share of cut-off completions."""
    tokens = series(data.grpo_metrics, "mean_tokens", "completions/mean_length")
    cut = series(data.grpo_metrics, "truncated_share", "completions/clipped_ratio")
    if tokens is None or cut is None:
        return None
    with drawing(3.0, 2, 1) as (figure, (above, below)):
        _curve(above, tokens, RL)
        above.set_title("tokens per completion")
        above.set_ylim(0, max(tokens[1]) * 1.12)
        _curve(below, cut, WARM)
        below.set_title("cut off at the limit")
        below.set_ylim(0, max(0.05, max(cut[1]) * 1.15))
        as_percent(below.yaxis)
        below.set_xlabel("step")
        for axes in (above, below):
            axes.locator_params(axis="y", nbins=4)
            quiet(axes)
        svg = to_svg(figure, "lengths")
    (start, end), (_, cut_end) = edges(tokens[1]), edges(cut[1])
    title = (
        f"Completions go from {start:.0f} to {end:.0f} tokens; {percent(cut_end)} are cut off at "
        "the end"
    )
    return Chart(title, svg, "Mean length per step, and the share that ran into the token limit.")


def warmstart_loss(data: Gathered) -> Chart | None:
    """Loss of the warm start."""
    found = series(data.warmstart_metrics, "loss")
    if found is None:
        return None
    start, end = edges(found[1])
    opd = data.warmstart_stage == "warmstart_opd"
    with drawing(2.3) as (figure, axes):
        _curve(axes, found, WARM)
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token")
        axes.set_ylim(0, max(found[1]) * 1.08)
        quiet(axes)
        svg = to_svg(figure, "warmstart-loss")
    name = "Distillation" if opd else "Fine-tuning"
    what = "Divergence from the teacher" if opd else "Cross-entropy on the answer's tokens"
    title = f"{name}: the loss goes from {start:.2f} to {end:.2f} in {len(found[0])} steps"
    return Chart(title, svg, f"{what} per step.{_chosen(data)}")


def _chosen(data: Gathered) -> str:
    """What the dev questions said of the warm start's checkpoints, if they were asked."""
    checked = series(data.warmstart_metrics, "dev_strict")
    if checked is None:
        return ""
    summary = data.manifests["warmstart"].summary
    return (
        f" Of {len(checked[0])} checkpoints that of step {summary['best_step']} was kept, with "
        f"{percent(summary['dev_strict_best'])} of the dev questions strictly right (the first: "
        f"{percent(checked[1][0])}, the last: {percent(checked[1][-1])})."
    )
