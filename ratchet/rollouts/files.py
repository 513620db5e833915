"""Find and read the tables in which an RL run logged its completions.

A file is one table: Parquet, a wandb table (`*.table.json`, also `.json` with columns and data),
JSON lines, a JSON list of objects, or CSV. A folder is searched through to the bottom for
`*.parquet`, `*.table.json`, `*.jsonl` and `*.csv`: TRL's output folder, a wandb folder or one of
its runs, a GRPO artifact. What counts as a table of completions, and what its columns mean, is in
`rollout_rows`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import UserError
from ratchet.store.keys import canonical_json, file_hash, text_hash

if TYPE_CHECKING:
    from ratchet.config.run import RolloutsConfig
    from ratchet.store.store import Store

Row = dict[str, Any]
SEARCHED = (".parquet", ".table.json", ".jsonl", ".csv")
"""Endings of tables in a folder; not plain `.json`, as settings and summaries are called."""
READ = (*SEARCHED, ".json")
BATCH_ROWS = 4096
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class LoggedTable:
    """One table; nothing but its columns has been read."""

    path: Path
    columns: list[str]
    read: Callable[[list[str]], Iterator[Row]]
    """Rows with these columns (a selection of `columns`), one after the other."""


def resolve(store: Store, named: str) -> str:
    """What `rollouts.path` stands for: the absolute path of a file or folder that exists, else
    `grpo/<key>` of the artifact it names in the store, else the folder where a GRPO run that hasn't
    finished keeps its steps. UserError when it names none of them, or a folder that still grows."""
    from ratchet.rollouts.training_run import STAGE, STEPS_FOLDER
    from ratchet.store.lineage import find_artifact, names_a_run
    from ratchet.store.runs import all_runs, load_run

    path = Path(named).expanduser()
    if path.exists():
        return str(path.resolve())
    head, _, name = named.partition("/")
    is_run = head != "" and bool(all_runs(store)) and names_a_run(store, head)
    try:
        artifact = find_artifact(store, f"{head}/{name or STAGE}" if is_run else named)
    except UserError as error:
        node = load_run(store, head).nodes.get(name or STAGE) if is_run else None
        if node is not None:
            steps = store.work_folder(node.stage, node.key) / STEPS_FOLDER
            if steps.is_dir():
                maker = _carried_out_with(store, node.key)
                if maker is not None:
                    raise UserError(
                        f"rollouts.path: '{named}' still grows, as run {maker} is being carried "
                        "out: wait until it has ended, or stop it first"
                    ) from None
                return str(steps)
        if is_run:
            raise UserError(f"rollouts.path: {error}") from None
        raise UserError(
            f"rollouts.path: there is no file or folder {path.absolute()}, and no run or artifact "
            f"'{named}' in {store.root}: name RUN/{STAGE}, TRL's output folder, a wandb run or an "
            "exported table"
        ) from None
    if artifact.manifest.stage != STAGE:
        raise UserError(
            f"rollouts.path: {artifact.ref} logged no rollouts: name a GRPO stage, such as "
            f"latest/{STAGE}, or a file or folder"
        )
    return artifact.ref


def _carried_out_with(store: Store, key: str) -> str | None:
    """A run that a living process carries out and that has the artifact `key` among its nodes."""
    from ratchet.store.runs import all_runs, is_carried_out

    for run in all_runs(store):
        keys = {node.key for node in run.nodes.values()}
        if key in keys and is_carried_out(store, run.run_id):
            return run.run_id
    return None


def find_tables(path: Path) -> list[Path]:
    """The table files at or below `path`, by name, numbers in their order (2 before 10).

    A folder called as a table (Spark's `rollouts.parquet/`) is a folder. UserError when there is
    nothing there, no table, or a link that leads nowhere.
    """
    if path.is_file():
        if not path.name.endswith(READ):
            raise UserError(f"rollouts.path: {path} is no table ({', '.join(READ)})")
        return [path]
    if not path.is_dir():
        raise UserError(f"rollouts.path: there is no {path}")
    # A link (wandb's latest-run) leads to files that are here already.
    found = set()
    for file in path.rglob("*"):
        if file.name.endswith(SEARCHED) and not file.is_dir():
            if not file.exists():
                raise UserError(
                    f"rollouts.path: {file} is a link to {file.readlink()}, which isn't there: "
                    "restore that file or remove the link"
                )
            found.add(file.resolve())
    if not found:
        raise UserError(
            f"rollouts.path: {path} holds no tables ({', '.join(SEARCHED)}): point at TRL's output "
            "folder (with log_completions=True), a wandb run's folder, or an exported file"
        )
    return sorted(found, key=_natural)


def _natural(file: Path) -> list[int | str]:
    parts = _DIGITS.split(str(file))  # text and digits take turns
    return [int(part) if part.isdigit() else part for part in parts]


def fingerprint(config: RolloutsConfig) -> str:
    """Hash over names and contents of the tables that `rollouts.path` names, for artifact keys.

    UserError as `find_tables`.
    """
    assert config.path is not None
    root = Path(config.path)
    files = find_tables(root)
    top = root.resolve() if root.is_dir() else root.resolve().parent
    listing = {
        str(file.relative_to(top)) if file.is_relative_to(top) else file.name: _hash_of(
            file, file.stat().st_mtime_ns, file.stat().st_size
        )
        for file in (file.resolve() for file in files)
    }
    return text_hash(canonical_json(listing))


@lru_cache(maxsize=4096)
def _hash_of(file: Path, mtime_ns: int, size: int) -> str:
    return file_hash(file)


def open_table(path: Path) -> LoggedTable:
    """The table in a file. UserError naming the file when it is empty or not what it is called."""
    if path.stat().st_size == 0:
        raise UserError(f"rollouts.path: {path} is empty")
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        return _csv(path) if path.suffix == ".csv" else _json(path)
    except UnicodeDecodeError:
        raise UserError(f"rollouts.path: {path} is not text in UTF-8") from None


def _parquet(path: Path) -> LoggedTable:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_schema(path).names
    except pa.ArrowInvalid as error:
        raise UserError(f"rollouts.path: {path} is no Parquet file ({error})") from None

    def read(wanted: list[str]) -> Iterator[Row]:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
                yield from batch.to_pylist()

    return LoggedTable(path, columns, read)


def _csv(path: Path) -> LoggedTable:
    csv.field_size_limit(2**31 - 1)  # a completion may be long

    with path.open(encoding="utf-8", newline="") as file:
        columns = list(csv.DictReader(file).fieldnames or [])

    def read(wanted: list[str]) -> Iterator[Row]:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.DictReader(file):
                yield {name: row[name] or None for name in wanted}

    return LoggedTable(path, columns, read)


def _json(path: Path) -> LoggedTable:
    """A wandb table, JSON lines, or a list of objects. Held in memory: wandb writes one a step."""
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            found: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"rollouts.path: {path} is not JSON ({error})") from None
    if isinstance(found, dict) and {"columns", "data"} <= found.keys():
        try:
            columns = [str(name) for name in found["columns"]]
            rows = [dict(zip(columns, values, strict=True)) for values in found["data"]]
        except (TypeError, ValueError):  # no lists, or lists of other lengths
            raise UserError(
                f"rollouts.path: {path} is a wandb table with rows that don't have a value per "
                "column: export it again"
            ) from None
    elif isinstance(found, list) and all(isinstance(row, dict) for row in found):
        columns = list(dict.fromkeys(name for row in found for name in row))
        rows = found
    else:
        raise UserError(
            f"rollouts.path: {path} holds neither a wandb table ('columns' and 'data') nor a list "
            "of objects"
        )

    def read(wanted: list[str]) -> Iterator[Row]:
        for row in rows:
            yield {name: row.get(name) for name in wanted}

    return LoggedTable(path, columns, read)
