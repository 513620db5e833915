"""Commands that look into training: `rollouts`, `doctor`, `replay-batch`."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli import options
from ratchet.errors import UserError
from ratchet.pipeline.request import open_store

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ratchet.rollouts.training_run import Training

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run (id, name, 'latest') or a GRPO artifact's key."),
]
Row = dict[str, Any]


def rollouts(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(min=1, help="Which step; the newest when left out.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    question: Annotated[
        str | None, typer.Option(help="Only this question: the start of its id.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many completions.")] = 4,
    store: options.Store = options.DEFAULT_STORE,
    as_json: options.Json = False,
) -> None:
    """Read the completions of a training step, with what each was paid for.

    Without --best or --worst: the best and the worst of the group whose rewards differ most.
    """
    from ratchet.rollouts.training_run import open_training

    if best and worst:
        raise UserError("--best and --worst exclude each other: give one of them")
    training = open_training(open_store(store, must_exist=True), run)
    chosen = training.steps[-1] if step is None else step
    rows = training.rollouts_of([chosen])
    if not rows:
        first, last = training.steps[0], training.steps[-1]
        raise UserError(f"there is no step {chosen}: {training.label} has {first} to {last}")
    if question is not None:
        rows = [row for row in rows if row["question_id"].startswith(question)]
        if not rows:
            raise UserError(f"no question '{question}' in step {chosen} of {training.label}")
    shown = _choose(rows, best, worst, count)
    if as_json:
        print(json.dumps(shown))
        return
    from rich.console import Console

    console = Console()
    _print_step(console, training, chosen, rows)
    texts = training.texts()
    for row in shown:
        question, gold = texts.get(row["question_id"], ("", ""))
        console.print(_completion(row, question, gold, training.weights))


def _choose(rows: list[Row], best: bool, worst: bool, count: int) -> list[Row]:
    """Which completions are shown, in which order; those without a reward come last."""
    if best or worst:
        sign = -1 if best else 1
        return sorted(rows, key=lambda row: (row["reward"] is None, sign * (row["reward"] or 0)))[
            :count
        ]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["reward"] is not None:
            groups.setdefault(row["question_id"], []).append(row)
    if not groups:
        return rows[:count]

    def spread(group: list[Row]) -> float:
        rewards = [row["reward"] for row in group]
        return float(max(rewards) - min(rewards))

    widest: list[Row] = max(groups.values(), key=spread)
    group = sorted(widest, key=lambda row: -row["reward"])
    half = count // 2
    return group if len(group) <= count else [*group[: count - half], *group[len(group) - half :]]


def _print_step(console: Console, training: Training, step: int, rows: list[Row]) -> None:
    """The step at a glance: its figures, and a line per group."""
    from rich.table import Table

    figures = next((row for row in training.metrics if row["step"] == step), {})
    said = [
        f"{name.replace('_', ' ')} {figures[name]:.{digits}f}"
        for name, digits in (("reward", 2), ("strict", 2), ("lenient", 2), ("live_share", 2))
        if figures.get(name) is not None
    ]
    console.print(
        f"[bold]{training.label}[/]  step {step} of {training.steps[-1]}", highlight=False
    )
    console.print("   ".join(said), style="dim", highlight=False)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["question_id"], []).append(row)
    table = Table(box=None, pad_edge=False)
    for heading in ("question", "right", "rewards, sorted", ""):
        table.add_column(heading, no_wrap=heading == "question")
    for question_id, group in groups.items():
        rewards = sorted(
            (row["reward"] for row in group if row["reward"] is not None), reverse=True
        )
        live = bool(rewards) and rewards[0] - rewards[-1] > 1e-6
        table.add_row(
            question_id[:12],
            f"{sum(row['strict'] for row in group)} of {len(group)}",
            " ".join(f"{reward:.2f}" for reward in rewards),
            "" if live else "[dim]no gradient[/]",
        )
    console.print(table, highlight=False)


def _completion(row: Row, question: str, gold: str, weights: dict[str, float]) -> RenderableType:
    """One completion in a frame: what it says, and under it what it was paid for."""
    from rich.panel import Panel
    from rich.text import Text

    colour = "green" if row["strict"] else "yellow" if row["lenient"] else "red"
    verdict = (
        "right" if row["strict"] else "right, not in the format" if row["lenient"] else "wrong"
    )
    if row["status"] != "ok":
        verdict = row["status"].replace("_", " ")
    reward = "none" if row["reward"] is None else f"{row['reward']:.2f}"
    paid = [
        f"{name.rpartition(':')[2]} {weight * value:.2f}"
        for name, weight in weights.items()
        if (value := row.get(f"reward_{name}"))
    ]
    text = Text()
    if question:
        text.append(f"{shorten(question, 400, placeholder=' …')} [{gold}]\n\n", style="dim")
    text.append(row["completion"].strip() + "\n\n")
    text.append("paid for: " + (", ".join(paid) or "nothing"), style="cyan")
    end = ", cut off" if row["finish_reason"] == "length" else ""
    return Panel(
        text,
        title=Text(f"{verdict} · reward {reward} · advantage {row['advantage']:+.2f}"),
        subtitle=Text(
            f"{row['question_id'][:12]} #{row['sample_index']} · {row['num_tokens']} tokens{end}"
        ),
        title_align="left",
        subtitle_align="right",
        border_style=colour,
    )


def doctor(
    run: RunArgument, store: options.Store = options.DEFAULT_STORE, as_json: options.Json = False
) -> None:
    """Say what holds a GRPO run back, with the evidence and what to change."""
    from ratchet.diagnostics.doctor import MIN_STEPS, examine
    from ratchet.rollouts.training_run import open_training

    training = open_training(open_store(store, must_exist=True), run)
    if len(training.metrics) < MIN_STEPS:
        raise UserError(
            f"{training.label} has {len(training.metrics)} steps: the doctor needs {MIN_STEPS}"
        )
    evidence = training.evidence()
    findings = examine(evidence)
    if as_json:
        print(
            json.dumps(
                [
                    {"diagnosis": one.diagnosis, "evidence": one.seen, "advice": one.advice}
                    for one in findings
                ]
            )
        )
        return
    from rich.console import Console

    console = Console()
    trend = evidence.trend()
    moved = "rose" if trend.rose else "did not rise"
    console.print(f"[bold]{training.label}[/]  {len(training.metrics)} steps", highlight=False)
    console.print(f"the reward {moved}: {trend.words}", highlight=False)
    for finding in findings:
        console.print(f"\n[bold red]{finding.diagnosis}[/]", highlight=False)
        console.print(f"  {finding.seen}", highlight=False, markup=False)
        console.print(f"  → {finding.advice}", highlight=False, markup=False)
    if findings:
        return
    console.print("nothing of what usually holds a run back shows", highlight=False)
    if not trend.rose:
        console.print(
            f"a rise shows above ± {2 * trend.error:.2f} here: more steps, more questions per step "
            "or a larger learning rate",
            highlight=False,
        )


def replay_batch(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The replay folder that the error named.")
    ],
) -> None:
    """Run a warm-start batch that was not finite again, alone, over attention × number format."""
    if not folder.is_dir():  # before torch is loaded to look into it
        raise UserError(f"no folder {folder}: name the one that the error message named")
    from tasks.runtime.worker import set_environment

    set_environment()
    from tasks.commands.replay import tell

    tell(folder.absolute())
