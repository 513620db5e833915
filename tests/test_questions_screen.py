"""No question in two places, nothing that gives a held-out question away."""

from __future__ import annotations

from ratchet.questions.base import Question, question_id
from ratchet.questions.load import Role
from ratchet.questions.screen import Item, Reason, counts, drop_duplicates, drop_overlapping


def item(role: Role, text: str, source: str = "s", *, drawn: bool = False) -> Item:
    identity = question_id(source, role, text)
    return Item(Question(identity, source, role, text, "1", None, None, "all"), role, drawn)


def test_duplicates_stay_where_they_count_most() -> None:
    items = [
        item("warmup", "in train and warmup"),
        item("train", "In train  and warmup"),
        item("train", "everywhere"),
        item("dev", "everywhere"),
        item("test", "everywhere", "one"),
        item("test", "Everywhere", "two"),
        item("warmup", "alone"),
    ]
    kept, dropped = drop_duplicates(items)
    assert kept == [items[1], items[4], items[6]]
    assert [entry.item for entry in dropped] == [items[0], items[2], items[3], items[5]]
    assert all(entry.reason is Reason.DUPLICATE for entry in dropped)
    assert dropped[1].detail == f"same text as test question {items[4].question.question_id} (one)"
    assert counts(dropped, "train") == {"duplicate": 1}
    assert counts(dropped, "warmup") == {"duplicate": 1}


def test_overlap_drops_training_rows_only() -> None:
    shared = "a b c d e"
    items = [
        item("train", f"x {shared}"),
        item("warmup", f"{shared} y"),
        item("train", "a b c d only"),
        item("dev", f"{shared} z"),
        item("test", f"w {shared} z"),
    ]
    kept, dropped = drop_overlapping(items, 5)
    assert kept == items[2:]
    assert [entry.item for entry in dropped] == items[:2]
    assert "shares 'a b c d e' with dev question" in dropped[0].detail
    assert drop_overlapping(items, 6) == (items, [])
    assert drop_overlapping(items, 0) == (items, [])


def test_symbolic_pairs_are_compared_by_numbers() -> None:
    frame = "{} has 5 pens and gives 2 of them away. How many pens are left then?"
    same, other = frame.format("Ann"), frame.format("Ann").replace("5", "9")
    held = frame.format("Bob")
    drawn = [item("train", same, drawn=True), item("train", other, drawn=True)]
    kept, dropped = drop_overlapping([*drawn, item("test", held, drawn=True)], 5)
    assert [entry.item for entry in dropped] == [drawn[0]]
    assert dropped[0].detail.startswith("same draw as test question")
    assert drawn[1] in kept
    # against a question from elsewhere, a shared run counts for symbolic questions too
    _, dropped = drop_overlapping([*drawn, item("test", held)], 5)
    assert [entry.item for entry in dropped] == drawn
