"""What the benchmark's figures say in words: whether the format or the maths fails, and what helps.

Rows are those of table 'benchmark'. A difference is called clear when the two 95% intervals don't
meet. That is stricter than a test of the difference, and all rows answer the same questions, so
what is called clear is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ratchet.verifier.answer_places import SHORT, WORDS, Place

Row = Mapping[str, Any]

FORMAT_GAP = 0.05
"""Share of questions lost to the format from which on it is called the problem."""
CUT_OFF = 0.05
"""Share of completions cut off from which on it is told."""


def row_name(row: Row) -> str:
    """The row in a few words; plain off and greedy go without saying."""
    parts = [row["prompt_format"]]
    if row["thinking"] == "on":
        parts.append("thinking")
    if row["decoding"] == "model":
        parts.append("own sampling")
    return " + ".join(parts)


def with_interval(row: Row, metric: str) -> str:
    """'76.2% (73.9 to 78.4)'."""
    low, high = row[f"{metric}_low"], row[f"{metric}_high"]
    return f"{row[metric]:.1%} ({low * 100:.1f} to {high * 100:.1f})"


def places_of(row: Row) -> dict[Place, float]:
    """Shares of the completions whose answer doesn't stand where it should, by where it stands."""
    return {Place(place): share for place, share in json.loads(row["answers_elsewhere"]).items()}


def places_in_short(row: Row) -> str:
    """'97% boxed, 2% bare', or an empty text."""
    return _shares(places_of(row), SHORT)


def _shares(places: Mapping[Place, float], words: Mapping[Place, str]) -> str:
    """Those that don't round to 0%."""
    rounded = {place: f"{share:.0%}" for place, share in places.items()}
    return ", ".join(f"{share} {words[place]}" for place, share in rounded.items() if share != "0%")


def apart(a: Row, b: Row) -> bool:
    """Whether the intervals of the strict shares don't meet."""
    return bool(a["strict_high"] < b["strict_low"] or b["strict_high"] < a["strict_low"])


def sentences(rows: Sequence[Row], own_format: str, own_thinking: bool) -> list[str]:
    """Per row whether format or maths loses the points and which measured format fixes it, then
    what thinking and sampling change, then whether the run's own setting is the best."""
    found = [" ".join(_of_row(row, rows)) for row in rows]
    found += _switched(rows, "thinking", "on", "off", "thinking")
    found += _switched(rows, "decoding", "model", "greedy", "its own sampling")
    return found + list(_advice(rows, own_format, own_thinking))


def _of_row(row: Row, rows: Sequence[Row]) -> Iterator[str]:
    gap = row["lenient"] - row["strict"]
    places = places_of(row)
    start = (
        f"{row_name(row)}: {row['strict']:.1%} right in the demanded format, "
        f"{row['lenient']:.1%} right anywhere"
    )
    if gap < FORMAT_GAP:
        missing = sum(places.values())
        fine = "the answers stand where they should, so what fails is the maths"
        note = _instead(places) if missing >= FORMAT_GAP else fine
        yield f"{start}; {note}."
    else:
        yield (
            f"{start}: the format, not the maths, costs {gap * 100:.0f} points; {_instead(places)}."
        )
        yield _fix(row, rows, gap)
    if row["truncated_share"] >= CUT_OFF:
        yield f"{row['truncated_share']:.0%} of the completions were cut off."


def _instead(places: Mapping[Place, float]) -> str:
    shares = _shares(places, WORDS)
    if not shares:
        return "the answers stand in the right place but not in the exact format"
    return f"instead of the demanded place, answers stood {shares}"


def _fix(row: Row, rows: Sequence[Row], gap: float) -> str:
    """Which measured format, under the same thinking and decoding, gives the points back."""
    others = [other for other in rows if other is not row and _same_but_format(row, other)]
    best = max(others, key=lambda other: other["strict"], default=None)
    if best is None:
        return "No other format was measured."
    figures = f"{with_interval(best, 'strict')} strict against {with_interval(row, 'strict')}"
    gained = best["strict"] - row["strict"]
    if gained <= 0:
        return f"No measured format does better; the best other, {best['prompt_format']}, " + (
            f"gets {figures}."
        )
    share = (
        "closes the gap" if gained >= gap else f"gives back {gained * 100:.0f} of {gap * 100:.0f}"
    )
    sure = (
        "clear beyond the intervals"
        if apart(best, row)
        else "but the intervals meet: ask more questions before you count on it"
    )
    return f"{best['prompt_format']} {share}: {figures}, {sure}."


def _same_but_format(a: Row, b: Row) -> bool:
    return (a["thinking"], a["decoding"]) == (b["thinking"], b["decoding"])


def _switched(rows: Sequence[Row], column: str, new: str, old: str, name: str) -> list[str]:
    """What `new` in place of `old` in a column changes: each clear change, then where there is
    none."""
    rest = [c for c in ("prompt_format", "thinking", "decoding") if c != column]
    found, unclear = [], []
    for row in (row for row in rows if row[column] == new):
        for other in (other for other in rows if other[column] == old):
            if any(row[c] != other[c] for c in rest):
                continue
            if not apart(row, other):
                unclear.append(row_name(other))
                continue
            found.append(
                f"{row_name(other)}, with {name}: {with_interval(row, 'strict')} strict against "
                f"{with_interval(other, 'strict')} without, at {row['mean_tokens']:.0f} tokens "
                f"against {other['mean_tokens']:.0f}; clear beyond the intervals."
            )
    if unclear:
        found.append(f"With {name} or without makes no clear difference to {'; '.join(unclear)}.")
    return found


def _advice(rows: Sequence[Row], own_format: str, own_thinking: bool) -> Iterator[str]:
    """Whether another setting than the run's own does better beyond doubt."""
    greedy = [row for row in rows if row["decoding"] == "greedy"] or list(rows)
    mine = [
        row
        for row in greedy
        if row["prompt_format"] == own_format and (row["thinking"] == "on") == own_thinking
    ]
    if not mine:
        thought = " with thinking" if own_thinking else ""
        yield f"The run's own format{thought}, {own_format}, was not measured."
        return
    best = max(greedy, key=lambda row: row["strict"])
    if best is not mine[0] and not apart(best, mine[0]) and best["strict"] > mine[0]["strict"]:
        yield (
            f"{row_name(best)} got most, {with_interval(best, 'strict')} strict against "
            f"{with_interval(mine[0], 'strict')} of the run's {row_name(mine[0])}, but the "
            "intervals meet: raise benchmark.limit before you change prompt.format."
        )
    if not apart(best, mine[0]):
        return
    settings = [f"prompt.format = '{best['prompt_format']}'"]
    if (best["thinking"] == "on") != own_thinking:
        settings.append(f"model.enable_thinking = {str(not own_thinking).lower()}")
    yield (
        f"{row_name(best)} gets {best['strict']:.1%} strictly right, the run's "
        f"{row_name(mine[0])} {mine[0]['strict']:.1%}: consider {' and '.join(settings)}."
    )
