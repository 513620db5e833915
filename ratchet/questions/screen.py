"""Which loaded questions a run may use: no question twice on either side.

Among training questions train wins over warmup, so that none is both RL and warm-up material, and
among held-out ones test wins over dev. A training question with the text of a held-out one is left
to the stage `decontaminate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ratchet.questions.base import Question
from ratchet.questions.decontaminate import normalise
from ratchet.questions.load import Role

PRECEDENCE: tuple[Role, ...] = ("test", "dev", "train", "warmup")
HELD_OUT: tuple[Role, ...] = ("test", "dev")


class Reason(StrEnum):
    """Why a question was dropped."""

    REPEAT = "repeat"  # again in its own source
    GOLD_UNPARSEABLE = "gold_unparseable"
    PROMPT_TOO_LONG = "prompt_too_long"
    DUPLICATE = "duplicate"  # the same text in another source or role of its side


@dataclass(frozen=True)
class Item:
    """A question in its role."""

    question: Question
    role: Role


@dataclass(frozen=True)
class Dropped:
    """A question that was left out, and why."""

    item: Item
    reason: Reason
    detail: str


def drop_duplicates(items: Sequence[Item]) -> tuple[list[Item], list[Dropped]]:
    """Keep one of each text (case and white space aside) among training and one among held-out
    questions, that of the first role by `PRECEDENCE`; the kept ones stay in order."""
    winner: dict[tuple[bool, str], int] = {}
    texts = [(item.role in HELD_OUT, normalise(item.question.question)) for item in items]
    by_precedence = sorted(range(len(items)), key=lambda i: PRECEDENCE.index(items[i].role))
    for index in by_precedence:
        winner.setdefault(texts[index], index)
    kept, dropped = [], []
    for index, item in enumerate(items):
        first = winner[texts[index]]
        if first == index:
            kept.append(item)
        else:
            detail = f"same text as {_name(items[first])}"
            dropped.append(Dropped(item, Reason.DUPLICATE, detail))
    return kept, dropped


def _name(item: Item) -> str:
    return f"{item.role} question {item.question.question_id} ({item.question.source})"


def counts(dropped: Sequence[Dropped], role: Role) -> dict[str, int]:
    """Number of dropped questions of a role by reason, commonest first."""
    found = Counter(entry.reason for entry in dropped if entry.item.role == role)
    return {reason.value: number for reason, number in found.most_common()}
