"""Which loaded questions a run may use: no question twice, nothing that gives a held-out one away.

Held-out roles win: a training question is dropped, never a test question because it was trained
on. Between roles of the same side the first of test, dev, train, warmup wins, so no question is
both warm-up and RL material.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ratchet.questions.base import Question
from ratchet.questions.decontaminate import normalise, overlapping, same_draw
from ratchet.questions.load import Role

PRECEDENCE: tuple[Role, ...] = ("test", "dev", "train", "warmup")
HELD_OUT: tuple[Role, ...] = ("test", "dev")


class Reason(StrEnum):
    """Why a question was dropped."""

    REPEAT = "repeat"  # again in its own source
    GOLD_UNPARSEABLE = "gold_unparseable"
    PROMPT_TOO_LONG = "prompt_too_long"
    DUPLICATE = "duplicate"  # the same text in another source or role
    OVERLAP = "overlap"  # gives a held-out question away


@dataclass(frozen=True)
class Item:
    """A question in its role."""

    question: Question
    role: Role
    drawn: bool
    """Whether it is a symbolic draw, which shares sentences with others by construction."""


@dataclass(frozen=True)
class Dropped:
    """A question that was left out, and why."""

    item: Item
    reason: Reason
    detail: str


def drop_duplicates(items: Sequence[Item]) -> tuple[list[Item], list[Dropped]]:
    """Keep one of each text (case and white space aside), that of the first role by
    `PRECEDENCE`; the kept ones stay in order."""
    winner: dict[str, int] = {}
    texts = [normalise(item.question.question) for item in items]
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


def drop_overlapping(items: Sequence[Item], num_words: int) -> tuple[list[Item], list[Dropped]]:
    """Drop train and warmup questions that share `num_words` consecutive words with a held-out
    one, or that are the same symbolic draw but for names (see `decontaminate`). 0 = off."""
    if num_words == 0:
        return list(items), []
    why: dict[int, str] = {}
    for drawn in (False, True):
        train = [i for i, item in enumerate(items) if _trains(item) and item.drawn is drawn]
        texts = [items[i].question.question for i in train]
        for other_drawn in (False, True):
            held = [i for i in items if i.role in HELD_OUT and i.drawn is other_drawn]
            held_texts = [item.question.question for item in held]
            if drawn and other_drawn:
                for at, other in same_draw(texts, held_texts).items():
                    why.setdefault(train[at], f"same draw as {_name(held[other])}")
                continue
            for at, (other, run) in overlapping(texts, held_texts, num_words).items():
                why.setdefault(train[at], f"shares '{run}' with {_name(held[other])}")
    kept = [item for index, item in enumerate(items) if index not in why]
    return kept, [Dropped(items[index], Reason.OVERLAP, why[index]) for index in sorted(why)]


def _trains(item: Item) -> bool:
    return item.role not in HELD_OUT


def _name(item: Item) -> str:
    return f"{item.role} question {item.question.question_id} ({item.question.source})"


def counts(dropped: Sequence[Dropped], role: Role) -> dict[str, int]:
    """Number of dropped questions of a role by reason, commonest first."""
    found = Counter(entry.reason for entry in dropped if entry.item.role == role)
    return {reason.value: number for reason, number in found.most_common()}
