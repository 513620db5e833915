"""No question twice among those trained on, or among held-out ones."""

from __future__ import annotations

from ratchet.questions.base import Question, question_id
from ratchet.questions.load import Role
from ratchet.questions.screen import Item, Reason, counts, drop_duplicates


def item(role: Role, text: str, source: str = "s") -> Item:
    identity = question_id(source, role, text)
    return Item(Question(identity, source, role, text, "1", None, None, "all"), role)


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
    # "everywhere" stays once on each side: what gives the test away is another stage's question
    assert kept == [items[1], items[2], items[4], items[6]]
    assert [entry.item for entry in dropped] == [items[0], items[3], items[5]]
    assert all(entry.reason is Reason.DUPLICATE for entry in dropped)
    assert dropped[1].detail == f"same text as test question {items[4].question.question_id} (one)"
    assert counts(dropped, "dev") == {"duplicate": 1}
    assert counts(dropped, "warmup") == {"duplicate": 1}
