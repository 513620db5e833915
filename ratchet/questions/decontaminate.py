"""Which training questions give away a held-out one.

Three rules, from plain to particular:

- *Identical*: equal after `normalise` (Unicode form, case, white space). Signs count: `x + 1` and
  `x - 1` differ.
- *n-gram*: a run of `words` consecutive words is shared. Words are runs of letters or digits;
  punctuation and signs fall away, thousands commas are joined, numbers and names count as words.
  A question of fewer words has no run and can only be identical.
- *Same draw*, for pairs of symbolic questions, in place of the n-gram rule: draws of one template
  share whole sentences by construction, so a shared run says nothing; the same sentence frame
  with the same numbers in the same order does, whatever the names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")


class Rule(StrEnum):
    """By which rule a training question gives a held-out one away."""

    IDENTICAL = "identical"
    SHARED_WORDS = "shared words"
    SAME_DRAW = "same draw"


@dataclass(frozen=True)
class Text:
    """A question as the rules see it."""

    question: str
    drawn: bool
    """Whether it is a symbolic draw."""


@dataclass(frozen=True)
class Overlap:
    """What a training question gives away."""

    rule: Rule
    heldout: int
    """Index of the held-out question, the first of several."""
    shared: str
    """The words they share; the whole normalised text but for the n-gram rule."""


def given_away(train: Sequence[Text], heldout: Sequence[Text], words: int) -> dict[int, Overlap]:
    """Train index → what it gives away, by the first rule that applies. With `words` = 0 only
    identical texts count."""
    found = {
        index: Overlap(Rule.IDENTICAL, other, normalise(train[index].question))
        for index, other in identical(_questions(train), _questions(heldout)).items()
    }
    if words == 0:
        return found
    for drawn in (False, True):
        mine = [index for index, text in enumerate(train) if text.drawn is drawn]
        for other_drawn in (False, True):
            theirs = [index for index, text in enumerate(heldout) if text.drawn is other_drawn]
            pair = _questions(train, mine), _questions(heldout, theirs)
            if drawn and other_drawn:
                rule = Rule.SAME_DRAW
                shared = {at: (o, normalise(pair[0][at])) for at, o in same_draw(*pair).items()}
            else:
                rule, shared = Rule.SHARED_WORDS, overlapping(*pair, words)
            for at, (other, text) in shared.items():
                found.setdefault(mine[at], Overlap(rule, theirs[other], text))
    return found


def _questions(texts: Sequence[Text], chosen: Sequence[int] | None = None) -> list[str]:
    return [texts[index].question for index in (range(len(texts)) if chosen is None else chosen)]


def normalise(question: str) -> str:
    """Compatibility form (NFKC), lower case, white space runs as one blank."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def words_of(question: str) -> list[str]:
    """Lower-case words and numbers: "Ann's 1,250 x's" → ['anns', '1250', 'xs']."""
    text = re.sub(r"['’]", "", normalise(question))
    return _WORD.findall(_COMMA.sub("", text))


def identical(train: Sequence[str], heldout: Sequence[str]) -> dict[int, int]:
    """Train index → first held-out index with the same normalised text."""
    first: dict[str, int] = {}
    for index, question in enumerate(heldout):
        first.setdefault(normalise(question), index)
    normalised = ((index, normalise(question)) for index, question in enumerate(train))
    return {index: first[text] for index, text in normalised if text in first}


def overlapping(
    train: Sequence[str], heldout: Sequence[str], words: int
) -> dict[int, tuple[int, str]]:
    """Train index → (held-out index, what is shared): identical text, else the first shared run
    of `words` words."""
    found = {index: (other, normalise(train[index])) for index, other in
             identical(train, heldout).items()}  # fmt: skip
    runs: dict[str, int] = {}
    for index, question in enumerate(heldout):
        for run in _runs(question, words):
            runs.setdefault(run, index)
    for index, question in enumerate(train):
        if index not in found:
            shared = next((run for run in _runs(question, words) if run in runs), None)
            if shared is not None:
                found[index] = (runs[shared], shared)
    return found


def _runs(question: str, words: int) -> list[str]:
    """All runs of `words` consecutive words, each as one text."""
    found = words_of(question)
    return [" ".join(found[i : i + words]) for i in range(len(found) - words + 1)]


def same_draw(train: Sequence[str], heldout: Sequence[str]) -> dict[int, int]:
    """Train index → first held-out index that is the same symbolic draw but for its names."""
    first: dict[tuple[str, ...], int] = {}
    for index, question in enumerate(heldout):
        first.setdefault(_frame(question), index)
    frames = ((index, _frame(question)) for index, question in enumerate(train))
    return {index: first[frame] for index, frame in frames if frame in first}


def _frame(question: str) -> tuple[str, ...]:
    """The words of a question without those that start with a capital (names, sentence starts)."""
    kept = (word for word in question.split() if not word[:1].isupper())
    return tuple(words_of(" ".join(kept)))
