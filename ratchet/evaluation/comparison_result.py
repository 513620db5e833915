"""From the artifacts of several variants to everything that is said of them.

Used by stage 'compare' for the variants of a run and by `ratchet compare` for any two. The first
variant is what was started from, the last one is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.config.run import SourceKind
from ratchet.evaluation.bands import measured_bands
from ratchet.evaluation.changed_answers import DECODING, count_changed, list_changed
from ratchet.evaluation.comparison import (
    ALL_BANDS,
    METRICS,
    Slice,
    Variant,
    compare_variants,
    detectable,
    format_gain,
    slices,
)
from ratchet.evaluation.variants import (
    check_same_answers,
    check_same_conditions,
    read_questions,
    read_variant,
)
from ratchet.evaluation.verdict import Price, Row, Verdict, contamination, judge, one_line
from ratchet.store.store import Artifact, Store
from ratchet.words import points

PUBLIC = (SourceKind.GSM8K, SourceKind.SVAMP, SourceKind.MATH500, SourceKind.DEEPMATH)
WHERE = ("metric", "decoding", "benchmark", "band", "variant_a", "variant_b")


@dataclass(frozen=True)
class Benchmarks:
    """What is known of the benchmarks beside their questions, by label."""

    about: dict[str, str]
    """What a reader must know of the questions."""
    public: tuple[str, ...]
    """Those anybody could have trained on."""
    fresh: tuple[str, ...]
    """Those drawn for the run."""


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison and what it comes to."""

    variants: list[str]
    compared: list[Row]
    """Rows of the 'comparison' table."""
    described: list[Row]
    verdicts: list[Verdict]
    warnings: list[str]
    changed: list[Row]
    num_changed: list[Row]
    parts: list[Slice]
    confidence: float

    @property
    def line(self) -> str:
        """The verdict in one line."""
        return one_line(self.verdicts, self.warnings)


def known_benchmarks(sources: list[Row]) -> Benchmarks:
    """What the test sources of a configuration say of their benchmarks."""
    about = {
        "seen": "new numbers in templates of the training set",
        "heldout": "templates never trained on",
    }
    named = [(source["name"] or source["kind"], source) for source in sources]
    drawn = [(name, s) for name, s in named if s["kind"] == SourceKind.SYMBOLIC]
    return Benchmarks(
        about={name: about[s["templates"]] for name, s in drawn if s["templates"] in about},
        public=tuple(name for name, s in named if s["kind"] in PUBLIC),
        fresh=tuple(name for name, _ in drawn),
    )


def _ancestors(store: Store, stage: str, key: str, found: dict[str, float]) -> bool:
    """Collect device seconds by key of an artifact and all it was made from; False when one of
    them is gone."""
    if key in found:
        return True
    artifact = store.find(stage, key)
    if artifact is None:
        return False
    found[key] = artifact.manifest.device_seconds
    parents = artifact.manifest.parents.values()
    return all(_ancestors(store, parent.stage, parent.key, found) for parent in parents)


def device_seconds_between(store: Store, before: Artifact, after: Artifact) -> float | None:
    """Device seconds that went into the model of one evaluation and not into that of another;
    None where a manifest is missing."""
    spent: list[dict[str, float]] = []
    for artifact in (before, after):
        model = artifact.manifest.parents.get("model")
        found: dict[str, float] = {}
        if model is None or not _ancestors(store, model.stage, model.key, found):
            return None
        spent.append(found)
    return sum(seconds for key, seconds in spent[1].items() if key not in spent[0])


def price_of(store: Store, variants: Mapping[str, Artifact]) -> Price | None:
    """What the last variant cost beyond the warm start or, without one, beyond the first variant;
    None where that isn't known or nothing was spent."""
    names = list(variants)
    since = "warmstart" if "warmstart" in names[1:-1] else names[0]
    seconds = device_seconds_between(store, variants[since], variants[names[-1]])
    return Price(since, seconds) if seconds else None


def _find(compared: list[Row], *wanted: str) -> Row:
    return next(row for row in compared if tuple(row[name] for name in WHERE) == wanted)


def _judge_all(
    variants: list[Variant],
    compared: list[Row],
    parts: list[Slice],
    known: Benchmarks,
    price: Price | None,
    confidence: float,
    seed: int,
) -> list[Verdict]:
    """One verdict per benchmark, in the order of the test questions; the first one leads."""
    first, *between, last = variants
    verdicts = []
    for part in (part for part in parts if part.band == ALL_BANDS):
        where = (DECODING, part.benchmark, ALL_BANDS)
        strict, lenient = (
            _find(compared, metric, *where, first.name, last.name) for metric in METRICS
        )
        verdicts.append(
            judge(
                strict,
                lenient,
                format_gain(first, last, DECODING, part, confidence, seed),
                [_find(compared, "strict", *where, variant.name, last.name) for variant in between],
                detectable(strict, confidence),
                confidence,
                known.about.get(part.benchmark, ""),
                price,
            )
        )
    return verdicts


def compare_evaluations(
    artifacts: Mapping[str, Artifact],
    questions: Artifact,
    *,
    samples: int,
    confidence: float,
    seed: int,
    price: Price | None = None,
) -> ComparisonResult:
    """Compare evaluations, first to last, on the test questions of artifact `questions`.

    UserError when they can't be compared.
    """
    import pyarrow as pa

    check_same_conditions(artifacts)
    rows = read_questions(questions)
    ids = pa.array([row["question_id"] for row in rows])
    bands = measured_bands(artifacts, ids.to_pylist())
    if bands is not None:
        rows = [row | {"band": band} for row, band in zip(rows, bands, strict=True)]
    read = [read_variant(name, artifact, ids) for name, artifact in artifacts.items()]
    variants = [variant for variant, _ in read]
    texts = {variant.name: found for variant, found in read}
    check_same_answers(variants, samples)

    parts = list(slices([row["source"] for row in rows], [row["band"] for row in rows]))
    compared, described = compare_variants(variants, parts, confidence, seed)
    known = known_benchmarks(questions.manifest.config["questions"]["test"])
    first, last = variants[0].name, variants[-1].name

    asked = {part.benchmark for part in parts}

    def lenient(names: tuple[str, ...]) -> list[Row]:
        return [
            _find(compared, "lenient", DECODING, name, ALL_BANDS, first, last)
            for name in names
            if name in asked
        ]

    return ComparisonResult(
        variants=[variant.name for variant in variants],
        compared=compared,
        described=described,
        verdicts=_judge_all(variants, compared, parts, known, price, confidence, seed),
        warnings=contamination(lenient(known.public), lenient(known.fresh), confidence),
        changed=[
            row
            for variant in variants[:-1]
            for row in list_changed(variant, variants[-1], rows, texts)
        ],
        num_changed=[count_changed(variant, variants[-1]) for variant in variants[:-1]],
        parts=parts,
        confidence=confidence,
    )


def markdown(judged: ComparisonResult) -> str:
    """The verdict, the variants and their differences on whole benchmarks, greedy."""
    lines: list[str] = []
    for verdict in judged.verdicts:
        lines += [f"- **{verdict.sentence}**", *(f"  - {note}" for note in verdict.notes)]
    lines += [f"- warning: {warning}" for warning in judged.warnings]
    lines += ["", "| benchmark | variant | strict | lenient | cut off | tokens |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in judged.described:
        if row["band"] == ALL_BANDS and row["decoding"] == DECODING:
            lines.append(
                f"| {row['benchmark']} | {row['variant']} | {row['strict']:.3f} | "
                f"{row['lenient']:.3f} | {row['truncated_share']:.1%} | {row['mean_tokens']:.0f} |"
            )
    lines += ["", "| benchmark | variants | metric | points | interval | p | gained | lost |"]
    lines.append("|---|---|---|---:|---|---:|---:|---:|")
    for row in judged.compared:
        if row["band"] == ALL_BANDS and row["decoding"] == DECODING:
            lines.append(
                f"| {row['benchmark']} | {row['variant_a']} → {row['variant_b']} | "
                f"{row['metric']} | {points(row['difference'])} | {points(row['ci_low'])} to "
                f"{points(row['ci_high'])} | {row['p_value']:.2g} | {row['gained']} | "
                f"{row['lost']} |"
            )
    return "\n".join(lines)
