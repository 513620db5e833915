"""Drop the training questions that give a held-out one away, and list each with what is shared.

Held-out questions always stay: nothing is left out of a test because it was trained on. Writes
`questions.parquet`, which training reads from here on, and `contaminated.parquet`, a row per
dropped question. The rules are those of `ratchet.questions.decontaminate`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ratchet.config.run import DecontaminateConfig, QuestionsConfig, SourceKind
from ratchet.errors import UserError
from ratchet.questions.decontaminate import Overlap, Text, given_away
from ratchet.store.schemas import to_table
from tasks.runtime.context import StageContext, StageResult

if TYPE_CHECKING:
    import pyarrow as pa

HELD_OUT = ("dev", "test")
TRAINED_ON = ("train", "warmup")
SHOWN = 20
"""Dropped questions on the page; the table has all."""
SHOWN_CHARACTERS = 160
Row = dict[str, Any]


def symbolic_labels(questions: QuestionsConfig) -> set[str]:
    """Labels of sources whose questions are draws from templates."""
    roles = (*TRAINED_ON, *HELD_OUT)
    sources = [source for role in roles for source in getattr(questions, role)]
    others = {source.label for source in sources if source.kind is not SourceKind.SYMBOLIC}
    return {source.label for source in sources} - others


def split(table: pa.Table, drawn: set[str], words: int) -> tuple[pa.Table, list[Row]]:
    """(the questions that stay, a 'contaminated' row for each that goes), in the table's order."""
    import numpy as np

    rows = table.select(["question_id", "role", "source", "question"]).to_pylist()
    train = [index for index, row in enumerate(rows) if row["role"] in TRAINED_ON]
    held = [index for index, row in enumerate(rows) if row["role"] in HELD_OUT]

    def texts(chosen: list[int]) -> list[Text]:
        return [Text(rows[i]["question"], rows[i]["source"] in drawn) for i in chosen]

    found = given_away(texts(train), texts(held), words)
    keep = np.ones(len(rows), dtype=bool)
    keep[[train[at] for at in found]] = False
    listed = [
        _contaminated(rows[train[at]], rows[held[found[at].heldout]], found[at])
        for at in sorted(found)
    ]
    return table.filter(keep), listed


def _contaminated(row: Row, heldout: Row, overlap: Overlap) -> Row:
    return {
        **row,
        "rule": overlap.rule.value,
        "shared": overlap.shared,
        "heldout_id": heldout["question_id"],
        "heldout_role": heldout["role"],
        "heldout_source": heldout["source"],
        "heldout_question": heldout["question"],
    }


def _by_rule(listed: list[Row], role: str) -> dict[str, int]:
    return dict(Counter(row["rule"] for row in listed if row["role"] == role).most_common())


def _why_empty(role: str, listed: list[Row]) -> str:
    counted = ", ".join(f"{rule} {number}" for rule, number in _by_rule(listed, role).items())
    return (
        f"no question is left in questions.{role}: all of them give held-out ones away "
        f"({counted}). Choose another source or slice (split, offset, limit), or other "
        "decontaminate.words"
    )


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    flat = " ".join(text.split())
    short = flat if len(flat) <= SHOWN_CHARACTERS else flat[: SHOWN_CHARACTERS - 1] + "…"
    return short.replace("|", "\\|")


def _markdown(listed: list[Row], num_trained_on: int, words: int) -> str:
    if not listed:
        rule = f"{words} consecutive words in common" if words else "the same text"
        return f"**No training question of {num_trained_on:,} gives a held-out one away** ({rule})."
    counted = Counter((row["source"], row["heldout_source"], row["rule"]) for row in listed)
    lines = [
        f"**{len(listed):,} of {num_trained_on:,} training questions dropped**: they give held-out "
        "ones away.",
        "",
        "| training source | held-out source | rule | questions |",
        "|---|---|---|---:|",
        *(f"| {a} | {b} | {rule} | {count:,} |" for (a, b, rule), count in counted.most_common()),
        "",
        "| dropped | gives away | what they share |",
        "|---|---|---|",
        *(
            f"| {_cell(row['question'])} | {row['heldout_role']}: {_cell(row['heldout_question'])} "
            f"| {row['rule']}: {_cell(row['shared'])} |"
            for row in listed[:SHOWN]
        ),
    ]
    if len(listed) > SHOWN:
        lines += ["", f"{len(listed) - SHOWN:,} more are in `contaminated.parquet`."]
    return "\n".join(lines)


def run(
    ctx: StageContext, *, questions: QuestionsConfig, decontaminate: DecontaminateConfig
) -> StageResult:
    """Write the questions that training may use. UserError where a role ends up empty."""
    source = ctx.inputs["questions"]
    table = source.table("questions")
    kept, listed = split(table, symbolic_labels(questions), decontaminate.words)
    before, after = (Counter(one.column("role").to_pylist()) for one in (table, kept))
    for role in TRAINED_ON:
        if before[role] and not after[role]:
            raise UserError(_why_empty(role, listed))
    ctx.write_table("questions", kept)
    ctx.write_table("contaminated", to_table("contaminated", listed))
    num_trained_on = sum(before[role] for role in TRAINED_ON)
    ctx.log(
        f"{len(listed):,} of {num_trained_on:,} training questions dropped: they give held-out "
        "ones away"
    )
    inherited = source.manifest.summary
    summary = {
        "questions": {role: after[role] for role in inherited["questions"]},
        "dropped": {role: _by_rule(listed, role) for role in TRAINED_ON},
        "num_dropped": len(listed),
        "prefilled": inherited["prefilled"],
    }
    return StageResult(
        summary=summary, markdown=_markdown(listed, num_trained_on, decontaminate.words)
    )
