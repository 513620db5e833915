"""Stories put together at random, so that the seedling reads clauses rather than templates.

A model trained on the templates alone knows each by its looks and fails on any other. A story is an
opening, up to three happenings and a question, in the words of the templates. The held-out
templates stay held out: stories with the same succession of clauses as one of them are not made,
and a last check on the text drops any story that reads like a held-out wording.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from ratchet.questions import symbolic
from ratchet.questions.symbolic import LARGEST

HELDOUT_KINDS = frozenset(
    {
        ("dollars", "earns", "now"),  # saves
        ("has", "fewer", "together"),  # fewer_together
        ("boxes", "more", "less", "now"),  # boxes_more_gives
        ("has", "half", "times", "together"),  # half_times_together
        ("has", "more", "less", "times", "together"),  # buys_gives_times_together
        ("dollars", "purchase", "share", "own"),  # change_shares_own
        ("boxes", "more", "less", "less", "give_half"),  # boxes_gives_twice_half
    }
)
"""Successions of clauses that held-out templates consist of (the others use clauses that stories
don't have)."""
COMPARISONS = frozenset({"times", "more_than", "fewer"})
"""Clauses that bring in a second person."""
_NUMBER = re.compile(r"\d+")
_MARK = re.compile(r"\{(\w+)\}")


@dataclass
class Story:
    """A story while it is told. `value` is what `who` has at this point."""

    rng: random.Random
    people: list[str]
    who: str
    unit: str
    value: int = 0
    earlier: int = 0
    """What the person had with whom `who` was compared; 0 without such a person."""
    text: list[str] = field(default_factory=list)
    steps: list[tuple[str, int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def work_out(self, left: int, symbol: str, right: int) -> int:
        """Add a step of the solution; its result."""
        value = symbolic.apply(left, symbol, right)
        self.steps.append((f"{left}{symbol}{right}", value))
        return value

    def number(self, low: int, high: int) -> int:
        """A number from `low` to `high`."""
        return self.rng.randint(low, high)

    def other(self) -> str:
        """A person not met so far."""
        return self.people.pop()

    def pick(self, *choices: str) -> str:
        """One of the choices."""
        return self.rng.choice(choices)

    def divisors(self) -> list[int]:
        """2 to 9 friends who can share `value`."""
        return [k for k in range(2, 10) if self.value % k == 0 and self.value > k]


def tell(rng: random.Random) -> tuple[str, list[tuple[str, int]]]:
    """A question and the steps of its solution, (operation, result) each."""
    while True:
        story = _start(rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3))):
            _happening(story)
        _question(story)
        question = " ".join(_joined(story))
        kinds = tuple(story.kinds)
        if (
            1 <= len(story.steps) <= 5
            and kinds not in HELDOUT_KINDS
            and frame(question) not in heldout_frames()
        ):
            return question, story.steps


def _joined(story: Story) -> list[str]:
    """The story's sentences, some joined by "and" to the one before about the same person."""
    sentences: list[str] = []
    for sentence in story.text:
        who = sentence.split(" ", 1)[0]
        before = sentences[-1] if sentences else ""
        same = before.startswith(f"{who} ") and " and " not in before and who != "Then"
        if same and story.rng.random() < 0.6:
            sentences[-1] = f"{before[:-1]} and {sentence.removeprefix(f'{who} ')}"
        else:
            sentences.append(sentence)
    return sentences


def _start(rng: random.Random) -> Story:
    people = [one for one, _ in symbolic.word_lists()["name"]]
    rng.shuffle(people)
    thing = rng.choice(symbolic.word_lists()["thing"])[1]
    story = Story(rng, people, people.pop(), thing)
    a, b = story.number(2, 9), story.number(2, 9)
    kind = rng.choice(("has", "has", "boxes", "boxes", "share_in", "dollars", "works"))
    story.kinds.append(kind)
    if kind == "has":
        story.value = story.number(4, 60)
        story.text.append(f"{story.who} has {story.value} {thing}.")
    elif kind == "boxes":
        box = rng.choice(symbolic.word_lists()["box"])[1]
        story.text.append(
            f"{story.who} {story.pick('has', 'buys')} {a} {box} with {b} {thing} in each."
        )
        story.value = story.work_out(a, "*", b)
    elif kind == "share_in":
        story.text.append(
            f"{b} friends share {a * b} {thing} equally. {story.who} is one of the friends."
        )
        story.value = story.work_out(a * b, "/", b)
    else:
        story.unit = "dollars"
        if kind == "dollars":
            story.value = story.number(10, 90)
            story.text.append(f"{story.who} has {story.value} dollars.")
        else:
            story.text.append(f"{story.who} works for {a} hours and earns {b} dollars each hour.")
            story.value = story.work_out(a, "*", b)
    return story


def _more(s: Story) -> None:
    b = s.number(2, min(30, LARGEST - s.value))
    s.text.append(
        s.pick(
            f"{s.who} buys {b} more.",
            f"{s.who} finds {b} more.",
            f"Then {s.who} finds {b} more.",
            f"{s.other()} gives {s.who} {b} more.",
        )
    )
    s.value = s.work_out(s.value, "+", b)


def _less(s: Story) -> None:
    b = s.number(1, min(40, s.value - 2))
    s.text.append(
        s.pick(
            f"{s.who} loses {b} of them.",
            f"Then {s.who} loses {b} of them.",
            f"{s.who} gives {b} of them to {s.other()}.",
        )
    )
    s.value = s.work_out(s.value, "-", b)


def _half(s: Story) -> None:
    s.text.append(
        s.pick(
            f"{s.who} loses half of them.",
            f"Then {s.who} gives half of them to {s.other()}.",
        )
    )
    s.value = s.work_out(s.value, "/", 2)


def _times(s: Story) -> None:
    b = s.number(2, min(9, LARGEST // s.value))
    other = s.other()
    s.text.append(s.pick(
        f"{other} has {b} times as many.",
        f"{other} has {b} times as many {s.unit} as {s.who} has now.",
    ))  # fmt: skip
    s.who, s.earlier = other, s.value
    s.value = s.work_out(s.value, "*", b)


def _more_than(s: Story) -> None:
    b = s.number(2, min(30, LARGEST - s.value))
    other = s.other()
    s.text.append(f"{other} has {b} more than {s.who}.")
    s.who, s.earlier = other, s.value
    s.value = s.work_out(s.value, "+", b)


def _fewer_than(s: Story) -> None:
    b = s.number(1, min(40, s.value - 2))
    other = s.other()
    s.text.append(f"{other} has {b} fewer than {s.who}.")
    s.who, s.earlier = other, s.value
    s.value = s.work_out(s.value, "-", b)


def _earns(s: Story) -> None:
    b = s.number(2, min(40, LARGEST - s.value))
    s.text.append(s.pick(f"{s.who} earns {b} dollars.", f"Then {s.who} finds {b} dollars."))
    s.value = s.work_out(s.value, "+", b)


def _spends(s: Story) -> None:
    b = s.number(1, min(40, s.value - 2))
    s.text.append(f"Then {s.who} spends {b} dollars.")
    s.value = s.work_out(s.value, "-", b)


def _purchase(s: Story) -> None:
    a = s.number(2, min(9, s.value // 2 - 1))
    b = s.number(2, min(9, (s.value - 1) // a))
    thing = s.rng.choice(symbolic.word_lists()["thing"])[1]
    s.text.append(f"{s.pick('', 'Then ')}{s.who} buys {a} {thing} for {b} dollars each.")
    s.value = s.work_out(s.value, "-", s.work_out(a, "*", b))


Clause = tuple[str, Callable[[Story], None]]


def _happening(s: Story) -> None:
    """Add a clause that fits; none if none does."""
    room = s.value <= LARGEST - 3
    fits: list[Clause] = []
    if s.unit == "dollars":
        fits += [("earns", _earns)] if room else []
        fits += [("spends", _spends)] if s.value > 5 else []
        fits += [("purchase", _purchase)] * 2 if s.value > 12 else []
    else:
        fits += [("more", _more)] * 2 if room else []
        fits += [("less", _less)] * 2 if s.value > 5 else []
        fits += [("half", _half)] if s.value % 2 == 0 and s.value > 4 else []
        fits += [("times", _times)] if s.value * 2 <= LARGEST else []
        fits += [("more_than", _more_than)] if room else []
        fits += [("fewer", _fewer_than)] if s.value > 5 else []
    if fits:
        kind, tell_clause = s.rng.choice(fits)
        tell_clause(s)
        if kind not in COMPARISONS or COMPARISONS & set(s.kinds):
            s.earlier = 0  # "together" would be unclear
        s.kinds.append(kind)


def _question(s: Story) -> None:
    """End with what is asked."""
    kinds = ["now", "now"]
    kinds += ["share", "share", "own"] if s.divisors() else []
    kinds += ["give_half"] if s.value % 2 == 0 and s.unit != "dollars" and s.steps else []
    kinds += ["together"] * 6 if s.earlier and s.earlier + s.value <= LARGEST else []
    kind = s.rng.choice(kinds)
    if kind == "now":
        s.kinds.append("now")
        end = s.pick("have now", "have left") if s.kinds[-2] in ("less", "spends") else "have now"
        if s.earlier:
            end = "have"
        s.text.append(f"How many {s.unit} does {s.who} {end}?")
    elif kind == "together":
        s.kinds.append("together")
        s.text.append(f"How many {s.unit} do they have together?")
        s.work_out(s.earlier, "+", s.value)
    elif kind == "give_half":
        s.kinds.append("give_half")
        other = s.other()
        s.text.append(f"{s.who} gives half of the rest to {other}.")
        s.text.append(f"How many {s.unit} does {other} get?")
        s.work_out(s.value, "/", 2)
    else:
        _shares(s, own=kind == "own")


def _shares(s: Story, own: bool) -> None:
    k = s.rng.choice(s.divisors())
    rest = s.pick("them", "the rest", "all of them")
    s.text.append(f"{s.pick('', 'Then ')}{s.who} shares {rest} equally among {k} friends.")
    s.kinds.append("share")
    s.value = s.work_out(s.value, "/", k)
    if own:
        s.kinds.append("own")
        other, e = s.other(), s.number(2, 30)
        s.text.append(f"{other} is one of the friends and already has {e}.")
        s.text.append(f"How many {s.unit} does {other} have now?")
        s.work_out(s.value, "+", e)
    else:
        s.text.append(f"How many {s.unit} does each friend get?")


def frame(text: str) -> str:
    """A question without its numbers, people and words."""
    kinds = _kinds()
    words = re.findall(r"\w+", _NUMBER.sub("0", text))
    return " ".join(kinds.get(word, word) for word in words)


@lru_cache(maxsize=1)
def _kinds() -> dict[str, str]:
    lists = symbolic.word_lists()
    return {word: kind for kind, pairs in lists.items() for pair in pairs for word in pair}


@lru_cache(maxsize=1)
def heldout_frames() -> frozenset[str]:
    """The frames of all held-out wordings."""
    frames = set()
    for template in symbolic.load_templates():
        if template.heldout:
            for wording in template.wordings:
                plain = _MARK.sub(lambda m: symbolic.word_list(m[1]), wording)
                lists = symbolic.word_lists()
                words = [w if w in lists or len(w) > 1 else "0" for w in re.findall(r"\w+", plain)]
                frames.add(" ".join(words))
    return frozenset(frames)
