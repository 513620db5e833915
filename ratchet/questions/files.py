"""Rows from tables: JSON lines, a JSON list, Parquet or CSV, in a file or a folder of splits, or on
the Hugging Face hub.

Everything wrong with a file is a `UserError` that names the file and, where there is one, the
line, because these files are made by users.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import UserError
from ratchet.questions.base import Row

ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
SPLIT_NAMES = ("train", "validation", "valid", "dev", "test")
"""File names that say which split a file holds."""


@dataclass(frozen=True)
class Table:
    """Rows with the place each came from."""

    rows: list[Row]
    places: list[str]
    """'file:line', or 'file: row n' (from 1) where lines mean nothing."""
    columns: list[str]
    """Columns of the table, or of its first row where rows may differ."""


def split_files(path: Path, split: str | None, default: str) -> tuple[list[Path], str]:
    """The files that hold a split, and the split's name.

    A file is one split, called `split` or else as the file. In a folder it is the file
    `<split>.<ending>` or the shards `<split>-*.parquet`, with `default` where none is asked for.
    UserError when there is no such split.
    """
    if path.is_file():
        if split is not None and path.stem in SPLIT_NAMES and path.stem != split:
            raise UserError(
                f"{path} is not the split '{split}': leave split out or point path at its folder"
            )
        return [path], split or path.stem
    wanted = split or default
    whole = [path / f"{wanted}{ending}" for ending in ENDINGS]
    found = [file for file in whole if file.is_file()]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise UserError(f"{path} holds {names}: point path at one of them")
    found = found or sorted(path.glob(f"{wanted}-*.parquet"))
    if not found:
        names = ", ".join(sorted({_split_of(file) for file in table_files(path)})) or "no tables"
        raise UserError(
            f"{path} has no split '{wanted}': it holds {names}; set split to one of those or point "
            "path at a file"
        )
    return found, wanted


def table_files(folder: Path) -> list[Path]:
    """Every table directly in `folder`, by name."""
    return sorted(f for f in folder.iterdir() if f.suffix in ENDINGS and f.is_file())


def _split_of(file: Path) -> str:
    return file.stem.split("-")[0] if file.suffix == ".parquet" else file.stem


def existing(path: Path) -> Path:
    """The absolute path, UserError when there is nothing (or no table) there."""
    full = path.expanduser().absolute()
    if not full.exists():
        parent = next(p for p in full.parents if p.is_dir())
        close = difflib.get_close_matches(full.name, [f.name for f in parent.iterdir()], n=1)
        hint = f"; did you mean {parent / close[0]}?" if close and parent == full.parent else ""
        raise UserError(f"no file or folder {path} (looked for {full}){hint}")
    if full.is_file() and full.suffix not in ENDINGS:
        raise UserError(f"{full} is no table: its name must end in {', '.join(ENDINGS)}")
    return full


def read_tables(files: list[Path], wanted: Collection[str]) -> Table:
    """The rows of all files one after another; of Parquet only the `wanted` columns are read."""
    parts = [_read(file, wanted) for file in files]
    return Table(
        rows=[row for part in parts for row in part.rows],
        places=[place for part in parts for place in part.places],
        columns=parts[0].columns,
    )


def _read(file: Path, wanted: Collection[str]) -> Table:
    if file.suffix == ".parquet":
        table = _read_parquet(file, wanted)
    else:
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text (byte {error.start})") from None
        if file.suffix == ".csv":
            table = _read_csv(file, text)
        elif text.lstrip()[:1] == "[":
            table = _read_list(file, text)
        else:
            table = _read_lines(file, text)
    if not table.rows:
        raise UserError(f"{file} holds no rows")
    return table


def _read_lines(file: Path, text: str) -> Table:
    rows, places = [], []
    # split on newlines only: a JSON string may hold other line separators
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place} is not valid JSON: {error.msg}") from None
        rows.append(_object(row, place))
        places.append(place)
    return Table(rows, places, list(rows[0]) if rows else [])


def _read_list(file: Path, text: str) -> Table:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno} is not valid JSON: {error.msg}") from None
    places = [f"{file}: row {number}" for number in range(1, len(items) + 1)]
    rows = [_object(item, place) for item, place in zip(items, places, strict=True)]
    return Table(rows, places, list(rows[0]) if rows else [])


def _object(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a JSON object with named columns")
    return row


def _read_csv(file: Path, text: str) -> Table:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows, places = [], []
    try:
        columns = list(reader.fieldnames or [])
        for row in reader:
            place = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{place} has not as many fields as the header ({len(columns)})")
            rows.append(dict(row))
            places.append(place)
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num} is not valid CSV: {error}") from None
    return Table(rows, places, columns)


def _read_parquet(file: Path, wanted: Collection[str]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_schema(file).names
        table = pq.read_table(file, columns=[name for name in columns if name in wanted])
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file} is not a readable Parquet file: {reason}") from None
    places = [f"{file}: row {number}" for number in range(1, table.num_rows + 1)]
    return Table(table.to_pylist(), places, columns)


def read_hub(
    repo: str, config: str | None, split: str, revision: str | None, wanted: Collection[str]
) -> Table:
    """The rows of one split, `wanted` columns only.

    UserError when the hub or the data set can't be reached, or has no such split.
    """
    from datasets import load_dataset

    try:
        data = load_dataset(repo, config, split=split, revision=revision)
    except OSError as error:  # no network, no such data set, offline mode: all are OSErrors
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"data set '{repo}' could not be fetched from the hub ({reason}): check the name and "
            "the network, or give a local file or folder as path"
        ) from error
    except ValueError as error:  # unknown split or configuration; the message lists the known ones
        raise UserError(f"data set '{repo}': {' '.join(str(error).split())}") from error
    columns = list(data.column_names)
    data = data.select_columns([name for name in columns if name in wanted])
    rows = data.to_list()
    where = f"{repo} ({split})"
    return Table(rows, [f"{where}: row {n}" for n in range(1, len(rows) + 1)], columns)
