"""Commands about the verifier and the rewards.

`verify` judges the rows of a JSONL file or, with `--self-test`, grades the grader
(`ratchet.audits.verifier_audit`); `rewards audit` plays the cheater.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ratchet.errors import UserError

if TYPE_CHECKING:
    from ratchet.verifier import Style

ROWS_AT_A_TIME = 2_000


def verify(
    in_path: Annotated[
        Path | None, typer.Option("--in", help="JSONL with id, gold, completion [, style].")
    ] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", help="JSONL with one verdict per row, same order.")
    ] = None,
    style: Annotated[
        Literal["tags", "hash", "boxed", "plain"],
        typer.Option(help="Where the answer must stand; a row's own style wins."),
    ] = "tags",
    self_test: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Grade the grader on a source: name, file or folder."),
    ] = None,
) -> None:
    """Check answers against golds, or grade the verifier itself with --self-test."""
    if self_test is not None:
        if in_path is not None or out_path is not None:
            raise UserError("give either --in and --out, or --self-test SOURCE")
        grade_the_grader(self_test)
    elif in_path is None or out_path is None:
        raise UserError("give --in and --out, or --self-test SOURCE")
    else:
        verify_file(in_path, out_path, style)


def verify_file(in_path: Path, out_path: Path, style: str) -> None:
    """Judge every row of `in_path` and write one verdict a row to `out_path`, in the same order.

    Rows in: {id, gold, completion [, style]}, one JSON object a line; a row's own style wins over
    `style`. Rows out: {id, status, strict, lenient, extracted, reason, seconds}. UserError for a
    file or row that cannot be read; `out_path` is then left as it was."""
    from ratchet.verifier import Status, as_style

    default = as_style(style)
    if not in_path.is_file():
        raise UserError(f"no file {in_path}: give --in a JSONL file of id, gold and completion")
    if not out_path.parent.is_dir():
        raise UserError(f"no folder {out_path.parent} to write to: make it or change --out")
    if out_path.is_dir():
        raise UserError(f"--out {out_path} is a folder: name a file in it")
    if out_path.exists() and out_path.samefile(in_path):
        raise UserError(f"--out {out_path} is the input, which would be lost: name another file")
    counts: dict[str, int] = dict.fromkeys(Status, 0)
    right = total = 0
    partial = out_path.with_name(f".{out_path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as out:
            rows = read_rows(in_path, default)
            while batch := list(islice(rows, ROWS_AT_A_TIME)):
                for row in judge_rows(batch):
                    out.write(json.dumps(row) + "\n")
                    counts[row["status"]] += 1
                    right += row["lenient"]
                    total += 1
        partial.replace(out_path)
    finally:
        partial.unlink(missing_ok=True)
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{total} verdicts in {out_path}: {right} right; {shown or 'no rows'}")


def read_rows(path: Path, default: Style) -> Iterator[dict[str, Any]]:
    """The rows of a file of cases, checked, each with its style."""
    number = 0
    with path.open(encoding="utf-8", errors="surrogatepass") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield read_row(line, f"{path}:{number}", default)
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 (after line {number}): convert it") from None


def read_row(line: str, where: str, default: Style) -> dict[str, Any]:
    """One row. Numbers keep their digits as written; null stands for no answer."""
    from ratchet.verifier import as_style

    try:
        row = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
    except ValueError as error:
        raise UserError(f"{where} is no JSON object ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object: write {{id, gold, completion}} on each line")
    missing = [key for key in ("id", "gold", "completion") if key not in row]
    if missing:
        raise UserError(f"{where} lacks {' and '.join(missing)}: it has {', '.join(row)}")
    for key in ("gold", "completion"):
        if row[key] is not None and not isinstance(row[key], str):
            raise UserError(f"{where}: {key} is a {type(row[key]).__name__}; make it a string")
    try:
        own = as_style(str(row["style"])) if row.get("style") is not None else default
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return {
        "id": json.loads(line)["id"],
        "gold": row["gold"] or "",
        "completion": row["completion"] or "",
        "style": own,
    }


def judge_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A verdict row for every case row."""
    from ratchet.verifier.verify import timed_verdicts

    timed = timed_verdicts(
        [row["completion"] for row in rows],
        [row["gold"] for row in rows],
        [row["style"] for row in rows],
    )
    for row, (verdict, seconds) in zip(rows, timed, strict=True):
        yield {
            "id": row["id"],
            "status": verdict.status.value,
            "strict": verdict.strict,
            "lenient": verdict.lenient,
            "extracted": verdict.extracted,
            "reason": verdict.reason,
            "seconds": round(seconds, 6),
        }


def grade_the_grader(source: str) -> None:
    """Grade the verifier on a source of questions and print the figures.

    `source` is a kind of source (`gsm8k`, `math500` …; a local copy is looked for under
    RATCHET_DATA) or a file or folder. UserError where a gold answer does not accept itself,
    SystemExit(1) where the verifier fails its own adversarial cases."""
    from ratchet.audits.verifier_audit import audit_verifier

    result = audit_verifier(source)
    print(result.text())
    if result.unacceptable_golds:
        raise UserError(
            f"{len(result.unacceptable_golds)} gold answers of {source} can never be matched "
            "(listed above): mend or drop these questions"
        )
    if not result.passed:
        raise SystemExit(1)


def rewards_audit() -> None:
    """Show what each known exploit would earn, and which reward pays for it."""
    from ratchet.audits.reward_audit import audit_rewards, table

    print(table(audit_rewards()))
