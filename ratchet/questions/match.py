"""Find the question that a prompt puts.

A prompt holds the question's text somewhere, between instructions, worked examples and marks of a
chat template. Texts are compared as `normalise` leaves them (Unicode form, case, white space), as
whole words and numbers: "1 + 2" doesn't stand in "1 + 29". Of several questions in one prompt the
one that ends last is what is asked; of two that end together the longer, which holds the other.

Unless it is a worked example and the question asked isn't among ours. So what follows it must be
instructions: words that end another prompt too, after another question. A question that was asked
and its answer end no other prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from ratchet.questions.decontaminate import normalise

ANCHOR_WORDS = 4
"""Words that a question is looked up by, after its first: that one may be glued to a mark."""
_INSIDE = re.compile(r"(?<=\w)(?=\w)|(?<=\d[.,])(?=\d)|(?<=\d)(?=[.,]\d)")
"""A place within a word or number."""
_LAST = chr(0x10FFFF)


class QuestionFinder:
    """Looks questions up by id, by text, and by a prompt that holds the text."""

    def __init__(
        self, ids: Sequence[str], texts: Sequence[str], prompts: Iterable[str] = ()
    ) -> None:
        """`prompts` are those that what follows a question is compared with; with fewer than two
        there is nothing to compare."""
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
        self._prompts = frozenset(prompts)
        self.unclear: set[str] = set()
        """Prompts met that hold a question of ours and may ask another."""

    def in_prompt(self, prompt: str) -> int | None:
        """Row of the question that `prompt` asks; None when it holds none of them."""
        if prompt not in self._known:
            text = normalise(prompt)
            row, end = self._last_in(text)
            if row is not None and not self._asked(self._texts[row], text[end:]):
                self.unclear.add(prompt)
                row = None
            self._known[prompt] = row
        return self._known[prompt]

    def _asked(self, question: str, rest: str) -> bool:
        """Whether `rest` ends another prompt as well, after something else than `question`."""
        if len(self._backwards) < 2:
            return True
        return self._num_ending_in(rest) > self._num_ending_in(question + rest)

    @cached_property
    def _backwards(self) -> list[str]:
        return sorted({normalise(prompt)[::-1] for prompt in self._prompts})

    def _num_ending_in(self, text: str) -> int:
        first = bisect_left(self._backwards, text[::-1])
        return bisect_left(self._backwards, text[::-1] + _LAST) - first

    def _last_in(self, prompt: str) -> tuple[int | None, int]:
        """(row, end) of the question that ends last in a normalised prompt."""
        words = prompt.split()
        candidates = set(self._short)
        for start in range(len(words) - ANCHOR_WORDS + 1):
            candidates.update(self._anchored.get(tuple(words[start : start + ANCHOR_WORDS]), ()))
        best: tuple[int, int, int] | None = None
        for row in candidates:
            text = self._texts[row]
            end = _end_of(text, prompt)
            if end is not None:
                best = max(best or (-1, 0, 0), (end, len(text), row))
        return (None, 0) if best is None else (best[2], best[0])


def _end_of(text: str, prompt: str) -> int | None:
    """Where `text` ends in `prompt`, the last time that it is no part of longer words or numbers;
    None when it isn't there."""
    end = len(prompt)
    while (at := prompt.rfind(text, 0, end)) >= 0:
        end = at + len(text)
        if not (_INSIDE.match(prompt, at) or _INSIDE.match(prompt, end)):
            return end
        end -= 1
    return None
