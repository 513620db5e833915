"""One Arrow schema per table, versioned.

Every Parquet file in the store is written through `write_table` and read through `read_table`.
The schema's name and version travel in the file's metadata, so a reader refuses a table it does
not know instead of guessing. A schema change that readers must know of raises `VERSION[name]`; one
that only renamed columns (`RENAMED`) is undone while reading.

Columns are required; a table may hold further columns only where the schema says so
(`scores` and `rollouts`: one column `reward_<name>` per reward; `metrics`: one per logged figure).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

REWARD = "reward_"
"""Beginning of the name of a column that holds a reward."""
VERSION: dict[str, int] = {
    "questions": 1,
    "contaminated": 1,
    "completions": 2,
    "scores": 1,
    "selection": 1,
    "metrics": 1,
    "rollouts": 1,
    "eval": 2,
    "comparison": 3,
    "benchmark": 2,
    "audit": 1,
}

RENAMED: dict[str, dict[str, str]] = {
    "eval": {"arm": "variant"},
    "comparison": {"arm_a": "variant_a", "arm_b": "variant_b"},
}
"""Columns of the version before the present one by the names that they have now."""

# name -> column -> Arrow type as `pyarrow.type_for_alias` (or `list<…>`) spells it
COLUMNS: dict[str, dict[str, str]] = {
    "questions": {
        "question_id": "string",
        "source": "string",
        "split": "string",
        "role": "string",  # train | warmup | dev | test
        "question": "string",
        "gold": "string",
        "reference_solution": "string",
        "difficulty": "double",
        "band": "string",
        "num_prompt_tokens": "int64",
    },
    "contaminated": {
        "question_id": "string",
        "role": "string",  # train | warmup
        "source": "string",
        "question": "string",
        "rule": "string",  # identical | shared words | same draw
        "shared": "string",
        "heldout_id": "string",
        "heldout_role": "string",  # dev | test
        "heldout_source": "string",
        "heldout_question": "string",
    },
    "completions": {
        "question_id": "string",
        "sample_index": "int64",
        "prompt_format": "string",
        "text": "string",
        "token_ids": "list<int32>",
        "num_tokens": "int64",
        "finish_reason": "string",  # stop | length
        "temperature": "double",
        "top_p": "double",
        "top_k": "int64",  # 0 is off
        "min_p": "double",
        "repetition_penalty": "double",
        "max_tokens": "int64",
        "seed": "int64",
        "model_key": "string",
    },
    "scores": {
        "question_id": "string",
        "sample_index": "int64",
        "status": "string",
        "extracted": "string",
        "strict": "bool",
        "lenient": "bool",
        "truncated": "bool",
        "num_tokens": "int64",
    },
    "selection": {
        "question_id": "string",
        "num_samples": "int64",
        "pass_rate_lenient": "double",
        "pass_rate_strict": "double",
        "bucket": "string",  # always_wrong | live | always_right | unseen
        "role": "string",  # rl | warmup | dropped
        "why": "string",
    },
    "metrics": {"step": "int64"},
    "rollouts": {
        "step": "int64",
        "question_id": "string",
        "sample_index": "int64",
        "prompt": "string",
        "completion": "string",
        "num_tokens": "int64",
        "finish_reason": "string",
        "status": "string",
        "strict": "bool",
        "lenient": "bool",
        "reward": "double",
        "advantage": "double",
        "policy_version": "int64",
    },
    "eval": {
        "question_id": "string",
        "benchmark": "string",
        "variant": "string",
        "decoding": "string",  # greedy | sampled | banding
        "sample_index": "int64",
        "band": "string",
        "text": "string",
        "num_tokens": "int64",
        "truncated": "bool",
        "status": "string",
        "extracted": "string",
        "strict": "bool",
        "lenient": "bool",
    },
    "comparison": {
        "metric": "string",  # strict | lenient | pass@k | cons@k
        "decoding": "string",
        "benchmark": "string",
        "band": "string",  # "all" or one band
        "variant_a": "string",
        "variant_b": "string",
        "num_questions": "int64",
        "value_a": "double",
        "value_b": "double",
        "difference": "double",
        "ci_low": "double",
        "ci_high": "double",
        "p_value": "double",
        "p_adjusted": "double",  # bands: Holm's over the benchmark's bands
        "gained": "int64",
        "lost": "int64",
    },
    "benchmark": {
        "prompt_format": "string",
        "thinking": "string",  # on | off | no switch
        "decoding": "string",  # greedy | model
        "temperature": "double",
        "top_p": "double",
        "top_k": "int64",
        "min_p": "double",
        "repetition_penalty": "double",
        "num_questions": "int64",
        "strict": "double",
        "strict_low": "double",
        "strict_high": "double",
        "lenient": "double",
        "lenient_low": "double",
        "lenient_high": "double",
        "parse_failure_rate": "double",
        "truncated_share": "double",
        "mean_tokens": "double",
        "answers_elsewhere": "string",  # JSON: place -> share of completions
    },
    "audit": {
        "sync": "int64",  # from 1; 0 before any
        "probe": "string",  # P0 to P4
        "check": "string",
        "group": "string",  # layer group, or what else was checked
        "count": "int64",  # weights or tokens
        "value": "double",  # the worst found
        "limit": "double",
        "ok": "bool",
        "worst": "string",  # where it was found
    },
}

# name -> prefix that further columns must carry ("" allows any)
EXTRA: dict[str, str] = {"scores": REWARD, "rollouts": REWARD, "metrics": ""}

META_NAME = b"ratchet.table"
META_VERSION = b"ratchet.version"


def arrow_type(alias: str) -> pa.DataType:
    """The Arrow type that a name in `COLUMNS` stands for."""
    import pyarrow as pa

    if alias.startswith("list<"):
        return pa.list_(pa.type_for_alias(alias[5:-1]))
    return pa.type_for_alias(alias)


def schema(name: str, extra: Iterable[str] = ()) -> pa.Schema:
    """The Arrow schema of table `name`, with `extra` columns of doubles appended."""
    import pyarrow as pa

    fields = [pa.field(column, arrow_type(alias)) for column, alias in COLUMNS[name].items()]
    fields += [pa.field(column, pa.float64()) for column in extra]
    meta = {META_NAME: name.encode(), META_VERSION: str(VERSION[name]).encode()}
    return pa.schema(fields, metadata=meta)


def extra_columns(name: str, columns: Iterable[str]) -> list[str]:
    """Columns beyond the schema; ValueError for one that the table does not allow."""
    further = [column for column in columns if column not in COLUMNS[name]]
    prefix = EXTRA.get(name)
    for column in further:
        if prefix is None or not column.startswith(prefix):
            raise ValueError(f"table '{name}' has no column '{column}'")
    return further


def to_table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table of schema `name`. Missing keys become null; unknown keys are an error."""
    import pyarrow as pa

    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(row))
    return pa.Table.from_pylist(rows, schema=schema(name, extra_columns(name, seen)))


def write_table(path: Path, name: str, table: pa.Table) -> None:
    """Write `table` to `path` as Parquet under schema `name` (columns put in schema order)."""
    import pyarrow.parquet as pq

    wanted = schema(name, extra_columns(name, table.column_names))
    missing = [column for column in wanted.names if column not in table.column_names]
    if missing:
        raise ValueError(f"table '{name}' lacks {', '.join(missing)}")
    pq.write_table(table.select(wanted.names).cast(wanted), path, compression="zstd")


def check_schema(found: pa.Schema, name: str, where: str) -> None:
    """UserError unless `found` is schema `name` in a version this code reads."""
    meta = found.metadata or {}
    have_name = meta.get(META_NAME, b"").decode()
    have_version = meta.get(META_VERSION, b"").decode()
    if have_name != name:
        raise UserError(
            f"{where} is {f'a table {have_name!r}' if have_name else 'no table of ours'}, "
            f"not {name!r}: point at a {name}.parquet that a stage wrote"
        )
    oldest = VERSION[name] - 1 if name in RENAMED else VERSION[name]
    if have_version not in (str(oldest), str(VERSION[name])):
        raise UserError(
            f"{where} holds {name!r} in version {have_version}, this Ratchet reads version "
            f"{VERSION[name]}: rerun the stage that wrote it"
        )


def read_table(path: Path, name: str, columns: list[str] | None = None) -> pa.Table:
    """Read the table at `path`, checked to be `name` in the current version, or in the one before
    it where only columns were renamed since."""
    import pyarrow.parquet as pq

    if not path.is_file():
        raise UserError(f"no {name} table at {path}")
    found = pq.read_schema(path)
    check_schema(found, name, str(path))
    old = {new: one for one, new in RENAMED.get(name, {}).items() if one in found.names}
    table = pq.read_table(path, columns=columns and [old.get(one, one) for one in columns])
    new = RENAMED[name] if old else {}
    return table.rename_columns([new.get(one, one) for one in table.column_names])
