"""Find the question that a prompt puts.

A prompt holds the question's text somewhere, between instructions, worked examples and marks of a
chat template. Texts are compared as `normalise` leaves them (Unicode form, case, white space). Of
several questions in one prompt the one that ends last is what is asked; of two that end together
the longer, which holds the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ratchet.questions.decontaminate import normalise

ANCHOR_WORDS = 4
"""Words that a question is looked up by, after its first: that one may be glued to a mark."""


class QuestionFinder:
    """Looks questions up by id, by text, and by a prompt that holds the text."""

    def __init__(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        self.row_of_id = {question_id: row for row, question_id in enumerate(ids)}
        self._texts = [normalise(text) for text in texts]
        self.row_of_text = {text: row for row, text in enumerate(self._texts)}
        self._anchored: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._short: list[int] = []
        for row, text in enumerate(self._texts):
            anchor = tuple(text.split()[1 : 1 + ANCHOR_WORDS])
            # The last word may be glued to what follows, so it is no part of an anchor.
            if len(text.split()) > 1 + ANCHOR_WORDS:
                self._anchored[anchor].append(row)
            else:
                self._short.append(row)
        self._known: dict[str, int | None] = {}

    def in_prompt(self, prompt: str) -> int | None:
        """Row of the question that `prompt` asks; None when it holds none of them."""
        if prompt not in self._known:
            self._known[prompt] = self._search(normalise(prompt))
        return self._known[prompt]

    def _search(self, prompt: str) -> int | None:
        words = prompt.split()
        candidates = set(self._short)
        for start in range(len(words) - ANCHOR_WORDS + 1):
            candidates.update(self._anchored.get(tuple(words[start : start + ANCHOR_WORDS]), ()))
        best: tuple[int, int, int] | None = None
        for row in candidates:
            text = self._texts[row]
            at = prompt.rfind(text)
            if at >= 0:
                best = max(best or (-1, 0, 0), (at + len(text), len(text), row))
        return None if best is None else best[2]
