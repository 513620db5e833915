"""Figures of the comparison and of the samples drawn before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ratchet.evaluation.verdict import direction
from ratchet.report.before_after import PassRates, histogram
from ratchet.report.figures import (
    BASE,
    INK,
    PAPER,
    RL,
    SECOND,
    Chart,
    as_percent,
    colour_of,
    drawing,
    legend_above,
    quiet,
    to_svg,
)
from ratchet.report.gather import Gathered, Row
from ratchet.words import count, percent, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES = 0.3


def _gain_title(rows: list[Row], confidence: float) -> str:
    """What the differences on whole benchmarks say."""
    said = []
    for row in (row for row in rows if row["band"] == "all"):
        moved = direction(row, confidence)
        size = f"{points(row['difference'])} points on {row['benchmark']}"
        said.append(size if moved else f"{size} (inside the noise)")
    return "Strict accuracy: " + ", ".join(said)


def _whisker(
    axes: Axes, y: float, row: Row, metric: str, size: float, label: str | None = None
) -> None:
    colour = RL if metric == "strict" else SECOND
    low, value, high = (100 * row[name] for name in ("ci_low", "difference", "ci_high"))
    axes.plot([low, high], [y, y], color=colour, linewidth=1.6, zorder=2)
    axes.plot(
        [value],
        [y],
        "o",
        color=colour,
        markerfacecolor=colour if metric == "strict" else PAPER,
        markersize=size,
        markeredgewidth=1.4,
        zorder=3,
        label=label,
    )


def forest(data: Gathered) -> Chart:
    """Differences of the last variant against the first, by benchmark and band."""
    first, last = data.variants[0], data.variants[-1]
    strict = data.pair_rows(first, last, "strict")
    lenient = data.pair_rows(first, last, "lenient")
    labels, gaps, position = [], [], 0.0
    for row in strict:
        position += 1.0 if row["band"] != "all" else 1.35
        whole = row["band"] == "all"
        labels.append(row["benchmark"] if whole else f"{row['band']} (n={row['num_questions']})")
        gaps.append(position)
    with drawing(0.8 + ROW_INCHES * position) as (figure, axes):
        axes.axvline(0, color=INK, linewidth=1.0, zorder=1)
        for y, a, b in zip(gaps, strict, lenient, strict=True):
            size = 6.5 if a["band"] == "all" else 4.5
            first_row = y == gaps[0]
            _whisker(axes, y - 0.16, a, "strict", size, "strict" if first_row else None)
            _whisker(axes, y + 0.16, b, "lenient", size, "lenient" if first_row else None)
        axes.set_yticks(gaps, labels)
        for label, row in zip(axes.get_yticklabels(), strict, strict=True):
            if row["band"] == "all":
                label.set(color=INK, weight="bold")
        axes.set_ylim(position + 0.7, 0.5)
        axes.set_xlabel("difference in percentage points")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, handletextpad=0.2)
        quiet(axes, grid="x")
        svg = to_svg(figure, "forest")
    caption = (
        f"The variant {data.variant_name(last)} minus {data.variant_name(first)}, greedy answers, "
        f"with paired {percent(data.confidence, 0)} score intervals (Tango); bands below their "
        "benchmark. Lenient counts the maths alone."
    )
    return Chart(_gain_title(strict, data.confidence), svg, caption)


def _height_for(data: Gathered) -> float:
    """Inches for a figure with a legend of all variants above it, three in a row."""
    return 2.7 + 0.2 * -(-len(data.variants) // 3)


def by_band(data: Gathered) -> Chart | None:
    """Strict accuracy of every variant by band of the first benchmark; None without bands."""
    benchmark = data.benchmarks[0]
    rows = [
        row
        for row in data.summary["variants"]
        if row["benchmark"] == benchmark and row["decoding"] == "greedy" and row["band"] != "all"
    ]
    if not rows:
        return None
    bands = list(dict.fromkeys(row["band"] for row in rows))
    with drawing(_height_for(data)) as (figure, axes):
        for position, variant in enumerate(data.variants):
            mine = {row["band"]: row for row in rows if row["variant"] == variant}
            shift = min(0.14, 0.8 / len(data.variants)) * (position - (len(data.variants) - 1) / 2)
            x = [bands.index(band) + shift for band in mine]
            y = [row["strict"] for row in mine.values()]
            low = [row["strict"] - row["strict_low"] for row in mine.values()]
            high = [row["strict_high"] - row["strict"] for row in mine.values()]
            colour = colour_of(variant, data.variants)
            axes.errorbar(
                x, y, [low, high], fmt="o", color=colour, markersize=5, linewidth=1.4,
                label=data.variant_name(variant),
            )  # fmt: skip
        axes.set_xticks(range(len(bands)), bands)
        axes.set_xlabel(f"difficulty band of {benchmark}")
        axes.set_ylim(-0.02, 1.02)
        as_percent(axes.yaxis)
        quiet(axes)
        legend_above(figure, axes)
        svg = to_svg(figure, "bands")
    caption = (
        f"Strict accuracy, greedy, with {percent(data.confidence, 0)} Wilson intervals. A band is "
        f"beyond the noise at {percent(data.confidence, 0)} for all {len(bands)} bands together "
        "(Holm)."
    )
    return Chart(_band_title(data, benchmark), svg, caption)


def _band_title(data: Gathered, benchmark: str) -> str:
    """Which bands moved from the first to the last variant, allowing for the number of bands."""
    moved = [
        f"{row['band']} ({points(row['difference'])})"
        for row in data.pair_rows(data.variants[0], data.variants[-1], "strict")
        if row["benchmark"] == benchmark
        and row["band"] != "all"
        and direction(row, data.confidence)
    ]
    if not moved:
        return f"No band of {benchmark} moves beyond the noise"
    return f"Bands of {benchmark} that move beyond the noise: {', '.join(moved)}"


def _two_bars(axes: Axes, sides: dict[str, Sequence[float]], labels: list[str]) -> None:
    """Two histograms beside each other; of many labels every few are written."""
    x = range(len(labels))
    for shift, colour, (name, heights) in zip((-0.2, 0.2), (BASE, RL), sides.items(), strict=True):
        axes.bar([i + shift for i in x], heights, 0.38, color=colour, label=name)
    shown = [i for i in x if len(labels) <= 9 or i % ((len(labels) - 1) // 4) == 0]
    axes.set_xticks(shown, [labels[i] for i in shown])
    quiet(axes)


def pass_rates(data: Gathered) -> Chart:
    """Histogram of pass rates before training, strict and lenient."""
    found: dict[str, Any] = data.selection["headroom"]
    strict, lenient = found["histogram_strict"], found["histogram_lenient"]
    k = len(strict) - 1
    alike = found["fewest"] == k == found["k"]
    with drawing(2.9) as (figure, axes):
        labels = [f"{i}/{k}" for i in range(k + 1)]
        _two_bars(axes, {"strict": strict, "lenient": lenient}, labels)
        axes.set_xlabel(
            f"right answers among {k} samples of a question"
            if alike
            else "share of a question's samples that are right"
        )
        axes.set_ylabel("questions")
        axes.legend(loc="upper right")
        svg = to_svg(figure, "pass-rates")
    wrong_strict = found["buckets_strict"]["always_wrong"]
    wrong = found["buckets_lenient"]["always_wrong"]
    title = (
        f"{wrong_strict:,} of {found['num_questions']:,} questions look always wrong, "
        f"{wrong_strict - wrong:,} of them by format alone"
        if wrong_strict
        else f"No question of {found['num_questions']:,} is always wrong"
    )
    caption = (
        f"Questions by the share of {k if alike else 'their'} samples that are right, "
        f"{'before training' if data.rollouts is None else 'as an earlier run logged them'}. "
        "Strict asks for the exact format as well."
    )
    return Chart(title, svg, caption)


def pass_rates_after(data: Gathered) -> Chart | None:
    """Histograms of pass rates before and after training; None where nothing was sampled after."""
    rates = data.pass_rates
    if rates is None:
        return None
    labels, before, after = histogram(rates)
    with drawing(2.9) as (figure, axes):
        _two_bars(axes, {"before": before, "after": after}, labels)
        axes.set_xlabel("share of a question's samples that are right")
        axes.set_ylabel("questions" if rates.held_out else "questions, groups")
        as_percent(axes.yaxis)
        legend_above(figure, axes)
        svg = to_svg(figure, "pass-rates-after")
    return Chart(_pass_rates_title(rates), svg, _pass_rates_caption(data, rates))


def _pass_rates_title(rates: PassRates) -> str:
    sides = (rates.before_q, rates.after_q)
    always = " to ".join(f"{(rate_q >= 1).mean():.0%}" for rate_q in sides)
    never = " to ".join(f"{(rate_q <= 0).mean():.0%}" for rate_q in sides)
    where = (
        f"On held-out questions ({rates.what})"
        if rates.held_out
        else f"In RL's rollouts ({rates.what}, training questions)"
    )
    return f"{where}: always right from {always}, never from {never}"


def _pass_rates_caption(data: Gathered, rates: PassRates) -> str:
    if rates.held_out:
        names = [data.variant_name(data.variants[end]) for end in (0, -1)]
        return (
            f"Questions by their share of strictly right samples, {rates.k_after} at temperature "
            f"1 from each model: {names[0]} and {names[1]}."
        )
    return (
        f"Before: {len(rates.before_q)} questions by their share of strictly right answers "
        f"among {rates.k_before} samples, after which the filter chose them for RL. After: "
        f"their {len(rates.after_q)} groups of {rates.k_after} in those steps. They were "
        "trained on, so this shows learning, not what it is worth: `evaluate.samples` draws "
        "from held-out ones."
    )


def at_k(data: Gathered) -> Chart | None:
    """pass@k and cons@k of every variant on the first benchmark; None without sampled answers."""
    rows = {
        row["variant"]: row["at_k"]
        for row in data.summary["variants"]
        if (row["benchmark"], row["band"], row["decoding"])
        == (data.benchmarks[0], "all", "sampled")
    }
    if not rows:
        return None
    with drawing(_height_for(data)) as (figure, axes):
        for variant in data.variants:
            colour = colour_of(variant, data.variants)
            for kind, style in (("pass", "-"), ("cons", (0, (3, 2)))):
                mine = [item for item in rows[variant] if item["kind"] == kind]
                k = [item["k"] for item in mine]
                label = data.variant_name(variant) if kind == "pass" else None
                axes.plot(
                    k, [item["value"] for item in mine], linestyle=style, color=colour,
                    marker="o" if kind == "pass" else None, markersize=4, label=label,
                )  # fmt: skip
                if kind == "pass":
                    low, high = ([item[end] for item in mine] for end in ("low", "high"))
                    axes.fill_between(k, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(k, [str(one) for one in k])
        axes.minorticks_off()
        axes.set_xlabel("samples of a question, k")
        axes.set_ylim(-0.02, 1.02)
        as_percent(axes.yaxis)
        quiet(axes)
        legend_above(figure, axes)
        svg = to_svg(figure, "at-k")
    return Chart(_at_k_title(data, rows), svg, _at_k_caption(data, k[-1]))


def _at_k_title(data: Gathered, rows: dict[str, list[Row]]) -> str:
    """How far one sample and several moved from the first to the last variant."""
    moves = []
    for k in (1, rows[data.variants[0]][-1]["k"]):
        ends = [
            next(i["value"] for i in rows[variant] if (i["kind"], i["k"]) == ("pass", k))
            for variant in (data.variants[0], data.variants[-1])
        ]
        moves.append(f"pass@{k} from {percent(ends[0], 0)} to {percent(ends[1], 0)}")
    return f"{data.benchmarks[0]}, sampled: {', '.join(moves)}"


def _at_k_caption(data: Gathered, most: int) -> str:
    return (
        f"Lenient. Lines: chance that at least one of k samples is right (unbiased, of {most} "
        f"samples), with {percent(data.confidence, 0)} intervals. Dashes: that the commonest "
        "answer among k is right (cons@k)."
    )


def use_of_tokens(data: Gathered) -> Chart | None:
    """Useful and wasted tokens of both phases as stacked bars; None when nothing was sampled."""
    phases = list(dict.fromkeys(entry.phase for entry in data.ledger))
    if not phases:
        return None
    useful = {
        phase: sum(e.share for e in data.ledger if e.phase == phase and e.useful)
        for phase in phases
    }
    with drawing(0.7 + 0.45 * len(phases)) as (figure, axes):
        for y, phase in enumerate(phases):
            axes.barh(y, useful[phase], 0.55, color=RL)
            axes.barh(y, 1 - useful[phase], 0.55, left=useful[phase], color=BASE)
            inside = useful[phase] > 0.12
            axes.text(
                useful[phase] - 0.015 if inside else useful[phase] + 0.015,
                y,
                percent(useful[phase], 0),
                va="center",
                ha="right" if inside else "left",
                color=PAPER,
                weight="bold",
            )
        axes.set_yticks(range(len(phases)), phases)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_ylim(len(phases) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        as_percent(axes.xaxis)
        quiet(axes, grid="x")
        axes.grid(visible=False)
        svg = to_svg(figure, "tokens")
    phase = phases[-1]
    total = sum(entry.tokens for entry in data.ledger if entry.phase == phase)
    title = f"{percent(useful[phase], 0)} of the {count(total)} tokens of the {phase} were of use"
    return Chart(title, svg, "Coloured: tokens that taught something. Grey: the headings below.")
