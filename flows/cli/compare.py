"""The command `compare`: any two arms question by question, from what the store holds.

A side is a run (its trained model), a node of a run, an artifact, or a model's folder or hub id. A
model counts where stage 'evaluate' has answered for it; of several evaluations of one model the
newest that fits the other side is taken.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.browse import DEFAULT_STORE, JsonOption, StoreOption, open_store
from ratchet.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ratchet.evaluation.comparison import Slice
    from ratchet.evaluation.judgement import Judgement
    from ratchet.store.store import Artifact, Store

Row = dict[str, Any]
SideArgument = Annotated[
    str,
    typer.Argument(
        help="A run, RUN/stage such as latest/warmstart, an artifact's key, or a model's folder "
        "or hub id."
    ),
]
CHANGES = (("gained", "maths"), ("lost", "maths"), ("gained", "format"), ("lost", "format"))


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(compare)


def evaluations(store: Store, ref: str) -> list[Artifact]:
    """Evaluations that `ref` stands for, newest first. UserError when there are none."""
    from ratchet.store.lineage import find_artifact, names_a_run

    if names_a_run(store, ref):
        return [find_artifact(store, f"{ref}/evaluate.rl")]
    every = list(store.artifacts())
    named = [
        item
        for item in every
        if item.manifest.stage == "model"
        and ref in (item.manifest.summary.get("source"), item.manifest.summary.get("path"))
    ] or [find_artifact(store, ref)]
    if named[0].manifest.stage == "evaluate":
        return named
    models = {(item.manifest.key, item.manifest.content) for item in named}
    found = [
        item
        for item in every
        if item.manifest.stage == "evaluate"
        and (parent := item.manifest.parents.get("model")) is not None
        and (parent.key, parent.content) in models
    ]
    if not found:
        raise UserError(
            f"'{ref}' ({named[0].ref}) has not been evaluated: add its model to a comparison with "
            '--set \'evaluate.arms=[{name="other", path="FOLDER"}]\''
        )
    return found


def questions_of(store: Store, artifact: Artifact) -> Artifact:
    """The questions that an evaluation answered."""
    parent = artifact.manifest.parents["questions"]
    return store.get(parent.stage, parent.key)


def check_same_questions(names: tuple[str, str], first: Artifact, second: Artifact) -> None:
    """UserError unless two 'questions' artifacts hold the same test questions."""
    from ratchet.evaluation.variants import read_questions

    if first.manifest.content == second.manifest.content:
        return
    asked = [{row["question_id"] for row in read_questions(item)} for item in (first, second)]
    if asked[0] != asked[1]:
        raise UserError(
            f"'{names[0]}' and '{names[1]}' answered different questions ({len(asked[0]):,} and "
            f"{len(asked[1]):,}, {len(asked[0] & asked[1]):,} in common): evaluate both on one "
            "test set"
        )


def matching(store: Store, a: str, b: str) -> tuple[Artifact, Artifact]:
    """An evaluation of either side that can be compared with the other's, newest first.

    UserError with what keeps the newest two apart when none can.
    """
    from ratchet.evaluation.variants import check_same_conditions

    refused: UserError | None = None
    sides = evaluations(store, a), evaluations(store, b)
    for first in sides[0]:
        for second in sides[1]:
            if first.ref == second.ref:
                refused = refused or UserError(f"'{a}' and '{b}' are both {first.ref}")
                continue
            try:
                check_same_conditions({a: first, b: second})
                check_same_questions((a, b), *(questions_of(store, x) for x in (first, second)))
            except UserError as error:
                refused = refused or error
                continue
            return first, second
    assert refused is not None, "neither side is empty"
    raise refused


def compare(
    a: SideArgument,
    b: SideArgument,
    store: StoreOption = DEFAULT_STORE,
    benchmark: Annotated[str | None, typer.Option(help="Only this benchmark.")] = None,
    band: Annotated[str | None, typer.Option(help="Only this difficulty band.")] = None,
    flips: Annotated[
        int, typer.Option(min=0, help="Changed answers shown of each kind, with completions.")
    ] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compare two models question by question: B against A, with what changed."""
    from ratchet.evaluation.judgement import judge_arms, price_of

    opened = open_store(store)
    first, second = matching(opened, a, b)
    arms = {a: first, b: second}
    settings = first.manifest.config["evaluate"]
    judged = judge_arms(
        arms,
        questions_of(opened, first),
        samples=settings["samples"],
        confidence=settings["confidence"],
        seed=0,
        price=price_of(opened, arms),
    )
    wanted = chosen(judged.parts, benchmark, band)
    if as_json:
        print(json.dumps(_as_json(judged, arms, wanted), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(judged.line.replace(" | ", "\n"), markup=False)
    if first.manifest.code_version != second.manifest.code_version:
        console.print(
            "The two were evaluated by different versions of the code; prompt, limits and verifier "
            "are the same.",
            style="yellow",
        )
    _print_tables(console, judged, wanted)
    _print_flips(console, judged, wanted, flips)


def chosen(parts: list[Slice], benchmark: str | None, band: str | None) -> set[tuple[str, str]]:
    """The slices asked for, as (benchmark, band). UserError when there is none of that name."""
    from ratchet.evaluation.comparison import ALL_BANDS, named_slice

    if benchmark is None and band is None:
        return {(part.benchmark, part.band) for part in parts}
    name = benchmark or parts[0].benchmark
    if band is not None:
        named_slice(parts, name, band)
        return {(name, band)}
    named_slice(parts, name, ALL_BANDS)
    return {(part.benchmark, part.band) for part in parts if part.benchmark == name}


def _inside(row: Row, wanted: set[tuple[str, str]]) -> bool:
    return (row["benchmark"], row["band"]) in wanted


def _as_json(judged: Judgement, arms: dict[str, Artifact], wanted: set[tuple[str, str]]) -> Row:
    return {
        "arms": {name: artifact.ref for name, artifact in arms.items()},
        "verdicts": [verdict.as_dict() for verdict in judged.verdicts],
        "warnings": judged.warnings,
        "described": [row for row in judged.described if _inside(row, wanted)],
        "compared": [row for row in judged.compared if _inside(row, wanted)],
        "num_flips": judged.num_flips,
        "flips": [row for row in judged.flips if _flip_inside(row, wanted)],
    }


def _flip_inside(row: Row, wanted: set[tuple[str, str]]) -> bool:
    return _inside(row, wanted) or (row["benchmark"], "all") in wanted


def _print_tables(console: Console, judged: Judgement, wanted: set[tuple[str, str]]) -> None:
    from rich.table import Table

    from ratchet.evaluation.comparison import ALL_BANDS
    from ratchet.evaluation.verdict import direction, points

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("\nquestions", "\nmetric"):
        table.add_column(heading)
    for heading in ("n", "A → B, %", "points", "interval", "p", "flips"):
        table.add_column(f"\n{heading}", justify="right", no_wrap=True)
    names = list(dict.fromkeys(part.benchmark for part in judged.parts))
    rows = [row for row in judged.compared if _inside(row, wanted)]
    for row in sorted(rows, key=lambda row: names.index(row["benchmark"])):
        whole = row["band"] == ALL_BANDS
        metric = row["metric"] if row["decoding"] == "greedy" else f"{row['metric']} (sampled)"
        table.add_row(
            row["benchmark"] if whole else f"  {row['band']}",
            metric,
            f"{row['num_questions']:,}",
            f"{100 * row['value_a']:.1f} → {100 * row['value_b']:.1f}",
            points(row["difference"]),
            f"{points(row['ci_low'])} to {points(row['ci_high'])}",
            f"{row['p_adjusted']:.2g}",
            f"+{row['gained']} −{row['lost']}",
            style={1: "green", -1: "red", 0: ""}[direction(row, judged.confidence)],
        )
    console.print(table)
    a, b = judged.arms
    console.print(f"A: {a}; B: {b}. The p-values of bands are Holm's.", style="dim", markup=False)


def _print_flips(
    console: Console, judged: Judgement, wanted: set[tuple[str, str]], number: int
) -> None:
    """Some changed answers of each kind; everything a model wrote is printed as it is."""
    for change, what in CHANGES if number else ():
        found = [
            row
            for row in judged.flips
            if (row["change"], row["what"]) == (change, what) and _flip_inside(row, wanted)
        ]
        for row in found[:number]:
            title = f"\n{change} by {what}: {row['question_id']} ({row['benchmark']})"
            console.print(title, style="bold", markup=False)
            console.print(f"{row['question']}\nRight answer: {row['gold']}", markup=False)
            for label, arm, answer in zip(
                "AB", (row["arm_a"], row["arm_b"]), (row["a"], row["b"]), strict=True
            ):
                read = "nothing read" if answer["extracted"] is None else answer["extracted"]
                console.print(f"{label} {arm}: {read}", style="dim", markup=False)
                console.print(answer["text"], markup=False)
