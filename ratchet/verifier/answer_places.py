"""Where a completion put its answer, whatever format was asked for.

A model that knows the answer and writes it in the wrong place looks like one that doesn't know it.
The benchmark counts the places, so that the two can be told apart. What a model thinks before it
answers is no answer: as for the verifier, only what follows `</think>` counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from ratchet.verifier import Style
from ratchet.verifier.extract import (
    SOLUTION_OPEN,
    after_reasoning,
    boxes,
    completion_text,
    last_marker,
    last_number,
)


class Place(StrEnum):
    """Where an answer can stand."""

    TAGS = "tags"
    HASH = "hash"
    BOXED = "boxed"
    NUMBER = "number"  # a number in running text
    NONE = "none"
    THOUGHT = "thought"  # the thought before the answer never ended


PLACE_OF: dict[Style, Place] = {
    Style.TAGS: Place.TAGS,
    Style.HASH: Place.HASH,
    Style.BOXED: Place.BOXED,
    Style.PLAIN: Place.NUMBER,
}
WORDS: dict[Place, str] = {
    Place.TAGS: "in <SOLUTION> tags",
    Place.HASH: "after ####",
    Place.BOXED: "in \\boxed{}",
    Place.NUMBER: "as a bare number",
    Place.NONE: "nowhere",
    Place.THOUGHT: "nowhere, in a thought that never ended",
}
SHORT: dict[Place, str] = {
    Place.TAGS: "tags",
    Place.HASH: "####",
    Place.BOXED: "boxed",
    Place.NUMBER: "bare",
    Place.NONE: "nowhere",
    Place.THOUGHT: "unended thought",
}


def places(text: str) -> set[Place]:
    """Every place in which `text` has an answer; a bare number counts only without the others."""
    answer = after_reasoning(completion_text(text))
    if answer is None:
        return {Place.THOUGHT}
    text = answer
    found = set()
    if SOLUTION_OPEN in text:
        found.add(Place.TAGS)
    if last_marker(text) >= 0:
        found.add(Place.HASH)
    if boxes(text):
        found.add(Place.BOXED)
    if found:
        return found
    return {Place.NUMBER} if last_number(text).answer is not None else {Place.NONE}


def elsewhere(texts: Iterable[str], style: Style) -> dict[str, float]:
    """Shares of all completions whose answer does not stand where `style` demands it, by the
    place where it stands instead (of several, the first of `Place`). Places with none are left
    out; the largest share comes first."""
    counts: Counter[Place] = Counter()
    total = 0
    for text in texts:
        total += 1
        found = places(text)
        if PLACE_OF[style] not in found:
            counts[next(place for place in Place if place in found)] += 1
    return {place.value: count / total for place, count in counts.most_common()}
