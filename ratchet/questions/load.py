"""From a `SourceConfig` to questions, and to a fingerprint of what it points at.

    rows (file, folder, hub or drawn) → parsed → repeats dropped → shuffled → offset, limit

Repeats go first, so `limit` counts different questions. Shuffling orders questions by a hash of
seed and id: the order of two questions does not depend on which others there are.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ratchet.config.run import SourceConfig, SourceKind
from ratchet.errors import UserError
from ratchet.questions import deepmath, gsm8k, math500, own_file, svamp, symbolic
from ratchet.questions.base import BadRowError, Parsed, Question, Reader, question_id
from ratchet.questions.files import (
    ENDINGS,
    SPLIT_NAMES,
    Table,
    existing,
    read_hub,
    read_tables,
    split_files,
    table_files,
)

Role = Literal["train", "warmup", "dev", "test"]

READERS: dict[SourceKind, Reader] = {
    SourceKind.GSM8K: gsm8k.READER,
    SourceKind.SVAMP: svamp.READER,
    SourceKind.MATH500: math500.READER,
    SourceKind.DEEPMATH: deepmath.READER,
}
DEFAULT_SPLIT: dict[Role, str] = {
    "train": "train",
    "warmup": "train",
    "dev": "test",
    "test": "test",
}
SYNONYMS: dict[str, tuple[str, ...]] = {
    "question": ("problem", "prompt", "query", "input", "text"),
    "gold": ("answer", "final_answer", "solution", "target", "label", "expected"),
}
"""Names that other data sets give to our columns, likeliest first."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Loaded:
    """What a source gave."""

    questions: list[Question]
    repeats: list[Question]
    """Later copies of a question in the whole split; the first copy was kept."""


def load_source(source: SourceConfig, role: Role, index: int = 0) -> list[Question]:
    """The questions of one source; see `load`."""
    return load(source, role, index).questions


def load(source: SourceConfig, role: Role, index: int = 0) -> Loaded:
    """The questions of `questions.<role>[index]` and the repeats that were dropped.

    UserError, one line, for a missing or unreadable file, missing columns, an unknown split, an
    unreachable hub or an empty selection.
    """
    setting = f"questions.{role}.{index}"
    if source.kind is SourceKind.SYMBOLIC:
        split, parsed = str(source.templates), _drawn(source)
    else:
        split, parsed = _read(source, role, setting)
    kept: dict[str, Question] = {}
    repeats = []
    for item in parsed:
        question = Question(
            question_id=question_id(source.label, split, item.question),
            source=source.label,
            split=split,
            question=item.question,
            gold=item.gold,
            reference_solution=item.reference_solution,
            difficulty=item.difficulty,
            band=item.band,
        )
        if question.question_id in kept:
            repeats.append(question)
        else:
            kept[question.question_id] = question
    return Loaded(_selection(list(kept.values()), source, setting), repeats)


def _selection(questions: list[Question], source: SourceConfig, setting: str) -> list[Question]:
    if source.shuffle_seed is not None:
        seed = source.shuffle_seed
        questions = sorted(questions, key=lambda q: _hash(f"{seed} {q.question_id}"))
    end = None if source.limit is None else source.offset + source.limit
    chosen = questions[source.offset : end]
    if not chosen:
        raise UserError(
            f"{setting} ({source.label}) selects nothing: offset {source.offset} skips all "
            f"{len(questions)} questions; lower it"
        )
    return chosen


def _drawn(source: SourceConfig) -> list[Parsed]:
    drawn = symbolic.draw(
        source.count, source.seed, source.templates, source.min_steps, source.max_steps
    )
    return [
        Parsed(
            question=item.question,
            gold=item.gold,
            reference_solution=item.reference_solution,
            difficulty=float(item.num_steps),
            band=gsm8k.step_band(item.num_steps),
        )
        for item in drawn
    ]


def _read(source: SourceConfig, role: Role, setting: str) -> tuple[str, list[Parsed]]:
    """Split name and parsed rows of a source that has rows."""
    reader = _reader(source, setting)
    wanted = {name for names in reader.needs for name in names} | set(reader.optional)
    path = _local(source)
    if path is None:
        split = source.split or DEFAULT_SPLIT[role]
        repo = _hub_id(source)
        config = reader.hub_config if repo == reader.hub_id else None
        table = read_hub(repo, config, split, source.revision, wanted)
        where = f"data set '{repo}'"
    else:
        files, split = split_files(path, source.split, DEFAULT_SPLIT[role])
        table = _cut(read_tables(files, wanted), reader, source.split, files[0])
        where = str(files[0])
    _check_columns(reader, table, where, source, setting)
    parsed = []
    for row, place in zip(table.rows, table.places, strict=True):
        try:
            parsed.append(reader.parse(row))
        except BadRowError as error:
            raise UserError(f"{place}: {error}") from None
    return split, parsed


def _cut(table: Table, reader: Reader, split: str | None, file: Path) -> Table:
    """The rows of `split` where the file holds all splits of the source; else all rows. Parquet
    files are taken to hold one split, as the hub stores them."""
    if split is None or not reader.file_splits or file.stem == split or file.suffix == ".parquet":
        return table
    if split not in reader.file_splits:
        names = ", ".join(reader.file_splits)
        raise UserError(f"{file} has no split '{split}': it has {names}; leave split out for all")
    rows = reader.file_splits[split]
    return Table(table.rows[rows], table.places[rows], table.columns)


def _reader(source: SourceConfig, setting: str) -> Reader:
    if source.kind is SourceKind.FILE:
        if source.path is None:
            raise UserError(f"{setting}: kind 'file' needs path, a local file or a hub id")
        return own_file.reader(source.columns)
    if source.columns:
        raise UserError(
            f"{setting}: columns are for kind 'file'; kind '{source.kind}' knows its own"
        )
    return READERS[source.kind]


def _check_columns(
    reader: Reader, table: Table, where: str, source: SourceConfig, setting: str
) -> None:
    """UserError unless one column of each needed group is there."""
    have = ", ".join(table.columns)
    ours = {column: name for name, column in source.columns.items()}
    for names in reader.needs:
        if any(name in table.columns for name in names):
            continue
        missing = " or ".join(f"'{name}'" for name in names)
        text = f"{where} has no column {missing}: it has {have}"
        if source.kind is not SourceKind.FILE:
            raise UserError(
                f"{text}; use kind 'file' with {setting}.columns for a layout of your own"
            )
        field = ours.get(names[0], names[0])
        near = _nearest(field, names[0], table.columns)
        raise UserError(f"{text}; map it with --set {setting}.columns.{field}={near or 'COLUMN'}")


def _nearest(field: str, missing: str, columns: list[str]) -> str | None:
    """The column most likely meant by our `field`, looked for as `missing`."""
    lower = {column.lower(): column for column in columns}
    for name in SYNONYMS.get(field, ()):
        if name in lower:
            return lower[name]
    close = difflib.get_close_matches(missing.lower(), lower, n=1)
    return lower[close[0]] if close else None


def _hub_id(source: SourceConfig) -> str:
    """The hub id of a source that has no local path."""
    repo = source.path or READERS[source.kind].hub_id
    assert repo is not None, f"kind {source.kind} has no usual data set"
    return repo


def _local(source: SourceConfig) -> Path | None:
    """The local path of a source, None where its rows are on the hub.

    Something that exists is local; otherwise `owner/name` is a hub id unless it ends like a
    table. For a source whose original file holds all splits, a folder's only table is that file.
    UserError for anything else.
    """
    if source.path is None:
        return None
    path = Path(source.path)
    if not path.expanduser().exists() and _HUB_ID.fullmatch(source.path):
        return None if path.suffix not in ENDINGS else existing(path)
    path = existing(path)
    if path.is_dir() and source.kind in READERS and READERS[source.kind].file_splits:
        tables = table_files(path)
        if len(tables) == 1 and tables[0].stem not in SPLIT_NAMES:
            return tables[0]
    return path


def fingerprint(source: SourceConfig) -> str:
    """What the source's content depends on beside its settings, for artifact keys.

    Local: sha256 over the files (all tables of a folder unless a split is set). Hub:
    'id@revision'; without a revision, changes on the hub go unnoticed. Symbolic: sha256 over the
    template files and the drawing parameters. UserError when a local path is missing.
    """
    if source.kind is SourceKind.SYMBOLIC:
        parameters = [
            source.count, source.seed, source.templates, source.min_steps, source.max_steps,
        ]  # fmt: skip
        files = sorted(symbolic.TEMPLATES.glob("*.toml"))
        return _hash(json.dumps([parameters, _file_hashes(files)]))
    _reader(source, f"a source of kind '{source.kind}'")
    path = _local(source)
    if path is None:
        return f"{_hub_id(source)}@{source.revision or 'main'}"
    if path.is_dir() and source.split is None:
        return _hash(json.dumps(_file_hashes(table_files(path))))
    files, _ = split_files(path, source.split, "")
    return _hash(json.dumps(_file_hashes(files)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hashes(files: list[Path]) -> list[tuple[str, str]]:
    """Name and content hash of each file; content is read again only when the file changed."""
    hashes = []
    for file in files:
        status = file.stat()
        hashes.append((file.name, _content_hash(file, status.st_mtime_ns, status.st_size)))
    return hashes


@lru_cache(maxsize=256)
def _content_hash(file: Path, mtime_ns: int, size: int) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
