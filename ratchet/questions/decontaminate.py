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

_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")


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
