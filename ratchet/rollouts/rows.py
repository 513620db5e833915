"""What the columns of logged completions mean, whoever logged them.

Ours (`rollouts`) name the question and hold verdicts. TRL's have `step`, `prompt`, `completion`, a
column per reward function and `advantage`, in Parquet and, the same, in wandb's tables; prompt and
completion are text or chat messages. A batch that several optimizer steps use is logged with each
of them, and the last one again when training ends: such repeats are found and counted once.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.config.run import RolloutsConfig
from ratchet.errors import UserError
from ratchet.prompts import answer_start
from ratchet.rollouts.files import LoggedTable, Row, find_tables, open_table

STEP = "step"
VERDICT = ("status", "strict", "lenient")
WHOSE = ("question_id", "question", "prompt")
"""Columns that tell the question, the surest first."""
COUNTED = ("num_tokens", "finish_reason")


@dataclass(frozen=True)
class Logged:
    """One completion as it was logged; None for what wasn't."""

    question_id: str | None
    question: str | None
    prompt: str | None
    opening: str | None
    """What a prompt that was logged as text holds of the answer."""
    completion: str | None
    verdict: tuple[str, bool, bool] | None
    """(status, strict, lenient)."""
    right: bool | None
    """By the column that the user named."""
    num_tokens: int | None
    """None too for NaN or text, as tables write what is missing."""
    truncated: bool | None


@dataclass
class Source:
    """The tables of completions at one place, and what was met in them."""

    tables: list[LoggedTable]
    config: RolloutsConfig
    steps: list[int]
    """Logged steps, in order; empty where they weren't logged."""
    used: frozenset[int]
    """Those that are read."""
    num_other_tables: int
    num_repeated: int = 0
    """Completions that were logged again."""
    _seen: set[bytes] = field(default_factory=set)

    def completions(self) -> Iterator[Logged]:
        """All completions of the steps used, repeats left out."""
        for table in self.tables:
            for batch in self._batches(table):
                if STEP in table.columns:
                    digest = hashlib.sha256(_content(batch).encode()).digest()
                    if digest in self._seen:
                        self.num_repeated += len(batch)
                        continue
                    self._seen.add(digest)
                for row in batch:
                    yield self._logged(row, table.path)

    def whose(self) -> tuple[set[str], set[str]]:
        """(question ids, texts of questions and prompts) of all steps."""
        ids: set[str] = set()
        texts: set[str] = set()
        for table in self.tables:
            for row in table.read([name for name in WHOSE if name in table.columns]):
                for name, value in row.items():
                    if value is not None:
                        (ids if name == "question_id" else texts).add(text_of(value))
        return ids, texts

    def _batches(self, table: LoggedTable) -> Iterator[list[Row]]:
        """Rows of one step after the other; single rows where no step is told."""
        batch: list[Row] = []
        for row in table.read(wanted_columns(table.columns, self.config.reward)):
            step = _step(row, table.path) if STEP in table.columns else None
            if step is not None and self.used and step not in self.used:
                continue
            if batch and (step is None or step != _step(batch[0], table.path)):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _logged(self, row: Row, path: Path) -> Logged:
        reward = self.config.reward
        verdict = None
        if reward is None and all(row.get(name) is not None for name in VERDICT):
            verdict = (str(row["status"]), _flag(row["strict"]), _flag(row["lenient"]))
        reason = row.get("finish_reason")
        return Logged(
            question_id=_text_or_none(row.get("question_id")),
            question=_text_or_none(row.get("question")),
            prompt=_text_or_none(row.get("prompt")),
            opening=_opening(row.get("prompt")),
            completion=_text_or_none(row.get("completion")),
            verdict=verdict,
            right=None
            if reward is None
            else _number(row[reward], reward, path) >= self.config.threshold,
            num_tokens=_whole_number(row.get("num_tokens")),
            truncated=None if reason is None else reason == "length",
        )


def wanted_columns(columns: list[str], reward: str | None) -> list[str]:
    """The columns of a table that are read."""
    names = (STEP, *WHOSE, "completion", *VERDICT, *COUNTED, "advantage")
    return [name for name in (*names, *([reward] if reward else [])) if name in columns]


def open_source(path: Path, config: RolloutsConfig) -> Source:
    """The tables of completions at `path`.

    UserError when there is none, when the column that `rollouts.reward` names isn't in one, or when
    steps are asked for and not logged.
    """
    found = [open_table(file) for file in find_tables(path)]
    usable = [table for table in found if _is_of_completions(table.columns, config.reward)]
    if not usable:
        raise UserError(_what_is_missing(found, config.reward))
    steps: set[int] = set()
    for table in usable:
        if config.reward is not None and config.reward not in table.columns:
            raise UserError(
                f"rollouts.reward: {table.path} has no column '{config.reward}': it has "
                f"{', '.join(table.columns)}"
            )
        if STEP in table.columns:
            steps.update(_step(row, table.path) for row in table.read([STEP]))
        elif config.first_steps or config.last_steps:
            raise UserError(
                f"rollouts.first_steps and last_steps need a column '{STEP}': {table.path} has "
                f"{', '.join(table.columns)}"
            )
    ordered = sorted(steps)
    used = ordered
    if config.first_steps is not None:
        used = ordered[: config.first_steps]
    elif config.last_steps is not None:
        used = ordered[-config.last_steps :]
    return Source(usable, config, ordered, frozenset(used), len(found) - len(usable))


def _is_of_completions(columns: list[str], reward: str | None) -> bool:
    """Whether a table tells the question and what can be judged."""
    judged = "completion" in columns or set(VERDICT) <= set(columns) or reward in columns
    return judged and any(name in columns for name in WHOSE)


def _what_is_missing(found: list[LoggedTable], reward: str | None) -> str:
    first = found[0]
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    if not any(name in first.columns for name in WHOSE):
        lacks = f"a column that tells the question ({', '.join(WHOSE)})"
    else:
        lacks = (
            "anything to judge by: 'completion' (our verifier reads it), our verdicts "
            f"({', '.join(VERDICT)}), or a reward that rollouts.reward names"
        )
    return (
        f"rollouts.path: {first.path}{others} can't be used, it lacks {lacks}. Its columns: "
        f"{', '.join(first.columns) or 'none'}"
    )


def _whole_number(value: Any) -> int | None:
    """None for what isn't a number, or isn't finite."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


def _step(row: Row, path: Path) -> int:
    step = _whole_number(row[STEP])
    if step is None:
        raise UserError(f"rollouts.path: {path} has a row with step {row[STEP]!r}")
    return step


def _number(value: Any, column: str, path: Path) -> float:
    """A reward; UserError for none, NaN or text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise UserError(
            f"rollouts.reward: {path} holds {value!r} in '{column}', which is neither right nor "
            "wrong: name a reward that applies to every completion, or leave rollouts.reward out "
            "to have the texts verified"
        )
    return number


def _flag(value: Any) -> bool:
    """A truth value, also as CSV writes it."""
    return value.strip().lower() in ("true", "1") if isinstance(value, str) else bool(value)


def _content(batch: list[Row]) -> str:
    rows = [{name: value for name, value in row.items() if name != STEP} for row in batch]
    return json.dumps(rows, sort_keys=True, default=str)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else text_of(value)


def _opening(prompt: Any) -> str | None:
    """None for chat messages: what the template wrote after them isn't known."""
    is_text = isinstance(prompt, str) and _messages_in(prompt) is None
    return answer_start(prompt) if is_text else None


def text_of(value: Any) -> str:
    """The text of a prompt or completion: a string, or chat messages, also as a string of them."""
    if isinstance(value, str):
        messages = _messages_in(value)
        try:
            return value if messages is None else text_of(messages)
        except RecursionError:
            return value
    if isinstance(value, list):
        return "\n".join(text_of(part) for part in value)
    if isinstance(value, dict):
        inner = value.get("content", value.get("text"))
        return "" if inner is None else text_of(inner)
    return str(value)


def _messages_in(text: str) -> list[Any] | None:
    """Chat messages that a CSV file or a table of texts holds as their JSON or Python form."""
    if not text.startswith("[{") or "content" not in text:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue  # a completion can hold anything
        if isinstance(found, list) and all(isinstance(item, dict) for item in found):
            return found
    return None
