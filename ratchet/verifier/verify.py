"""`verify` and `verify_batch`: from a completion and a gold answer to a verdict.

Numeric styles are decided here and exactly. Boxed answers are decided here when they are literally
equal or rational; the rest goes to the pool, each distinct (gold, answer) pair once.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.verifier.answers import latex
from ratchet.verifier.answers.arithmetic import UndefinedError
from ratchet.verifier.answers.numbers import Value, read_number
from ratchet.verifier.answers.scalars import LocalScalars, UndecidedError
from ratchet.verifier.answers.shapes import words_of
from ratchet.verifier.answers.structure import Comparison
from ratchet.verifier.extract import (
    Found,
    after_reasoning,
    boxes,
    completion_text,
    find_boxed,
    find_hash,
    find_plain,
    find_tags,
)
from ratchet.verifier.types import DEFAULT_DEADLINE_SECONDS, Status, Style, Verdict, as_style

CACHE_SIZE = 100_000
SHOWN_CHARS = 200
FIND = {Style.TAGS: find_tags, Style.HASH: find_hash, Style.PLAIN: find_plain}
WRAPPER = re.compile(r"\\(?:text|mbox|mathrm|textbf) *(?=\{)")
CONTENT = re.compile(r"[^\W_]|[∞∅]|\\[{}]")
LOCAL = Comparison(LocalScalars())
Reply = tuple[str, bool, str, float]  # as the pool gives it


class Cache:
    """The last `CACHE_SIZE` replies of the engine, by (gold, answer). Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.replies: OrderedDict[tuple[str, str], Reply] = OrderedDict()

    def get(self, pair: tuple[str, str]) -> Reply | None:
        with self.lock:
            reply = self.replies.get(pair)
            if reply is not None:
                self.replies.move_to_end(pair)
            return reply

    def put(self, pair: tuple[str, str], reply: Reply) -> None:
        if reply[0] not in (Status.OK, Status.TOO_COMPLEX, Status.PARSE_FAILURE):
            return  # a timeout may be the machine's fault
        with self.lock:
            self.replies[pair] = reply
            if len(self.replies) > CACHE_SIZE:
                self.replies.popitem(last=False)


CACHE = Cache()


@dataclass(frozen=True, slots=True)
class Open:
    """A boxed answer that only the engine can judge."""

    pair: tuple[str, str]
    found: Found


def failure(status: Status, reason: str, extracted: str | None = None) -> Verdict:
    return Verdict(status, shown(extracted), False, False, reason)


def shown(text: str | None) -> str | None:
    """`text` short enough for a table."""
    return text if text is None or len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def judged(found: Found, right: bool, reason: str) -> Verdict:
    return Verdict(Status.OK, shown(found.answer), right and found.exact, right, reason)


def gold_number(gold: str) -> Value | None:
    """The value of a numeric gold answer, or None."""
    return read_number(gold.removeprefix("####"))


def numeric_verdict(text: str, gold: str, style: Style) -> Verdict:
    """The verdict of a style whose answers are numbers. `text` has no reasoning block."""
    wanted = gold_number(gold)
    if wanted is None:
        return failure(Status.GOLD_UNPARSEABLE, "the gold answer is not one number")
    found = FIND[style](text)
    value = None if found.answer is None else read_number(found.answer)
    if value is None:
        return failure(Status.PARSE_FAILURE, found.why or "no number", found.answer)
    right = value == wanted
    reason = "right" if right else f"{shown(str(value))} is not {shown(str(wanted))}"
    if right and not found.exact:
        reason = "right, but not in the demanded format"
    return judged(found, right, reason)


def gold_content(gold: str) -> str | None:
    """The answer that a gold text holds: its box if it has one; None if it holds none."""
    if "\\boxed" in gold or "\\fbox" in gold:
        return find_boxed(gold).answer
    gold = gold.strip()
    words = words_of(gold) if len(gold) <= latex.MAX_CHARS else None
    prose = words is not None and "\\" not in gold and len(words.split()) > 1
    return None if prose or not CONTENT.search(WRAPPER.sub("", gold)) else gold


def boxed_verdict(text: str, gold: str) -> Verdict | Open:
    """The verdict on a boxed answer, or the pair that the engine must judge."""
    wanted = gold_content(gold)
    if wanted is None:
        return failure(Status.GOLD_UNPARSEABLE, "the gold holds no answer (empty or prose)")
    found = find_boxed(text)
    if found.answer is None:
        return failure(Status.PARSE_FAILURE, found.why)
    if wanted == found.answer and latex.balanced(wanted):
        return judged(found, True, "literally equal")
    if max(len(wanted), len(found.answer)) > latex.MAX_CHARS:
        return failure(Status.TOO_COMPLEX, "too long to compare", found.answer)
    return cleaned_verdict(latex.clean(wanted), latex.clean(found.answer), found)


def cleaned_verdict(wanted: str, answer: str, found: Found) -> Verdict | Open:
    """As `boxed_verdict`, for the two cleaned answers."""
    if not wanted or not latex.balanced(wanted):
        return failure(Status.GOLD_UNPARSEABLE, "the gold is no complete LaTeX", found.answer)
    if not answer or not latex.balanced(answer):
        return failure(Status.PARSE_FAILURE, "the box holds no answer", found.answer)
    if latex.squashed(wanted) == latex.squashed(answer):
        return judged(found, True, "equal after normalising")
    if "\\dots" in answer:
        return failure(Status.PARSE_FAILURE, "an ellipsis leaves the answer open", found.answer)
    if latex.nesting(answer) > latex.MAX_NESTING:
        return failure(Status.TOO_COMPLEX, f"nested deeper than {latex.MAX_NESTING}", found.answer)
    try:
        right = LOCAL.equal(wanted, answer)
    except UndecidedError:
        return engine_or_refusal(wanted, answer, found)
    except UndefinedError:
        return failure(Status.PARSE_FAILURE, "division by zero", found.answer)
    return judged(found, right, "equal" if right else "not equal")


def engine_or_refusal(wanted: str, answer: str, found: Found) -> Verdict | Open:
    """The engine's task, unless the answer must not reach it."""
    trouble = latex.too_complex(answer)
    if trouble is not None:
        return failure(Status.TOO_COMPLEX, trouble, found.answer)
    trouble = latex.too_complex(wanted)
    if trouble is not None:
        return failure(Status.TOO_COMPLEX, f"the gold answer: {trouble}", found.answer)
    return Open((wanted, answer), found)


def first_look(completion: str, gold: str, style: Style, prefilled: str) -> Verdict | Open:
    """Everything that needs no engine."""
    if not gold or not gold.strip():
        return failure(Status.GOLD_UNPARSEABLE, "the gold answer is empty")
    text = after_reasoning(prefilled + completion_text(completion))
    if text is None:
        return failure(Status.PARSE_FAILURE, "the reasoning is never closed")
    if style is Style.BOXED:
        return boxed_verdict(text, gold)
    return numeric_verdict(text, gold, style)


def engine_verdict(item: Open, reply: Reply) -> Verdict:
    """The verdict that the engine's reply gives."""
    status, right, reason, _ = reply
    if status == Status.OK:
        return judged(item.found, right, reason)
    return failure(Status(status), reason, item.found.answer)


def verify(
    completion: str,
    gold: str,
    style: Style | str,
    *,
    prefilled: str = "",
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
) -> Verdict:
    """The verdict on one completion. Never raises for any text.

    `prefilled` is what the chat template already wrote at the start of the answer (such as the
    opening working tag); it counts as part of the completion."""
    return verify_batch(
        [completion], [gold], style, prefilled=prefilled, deadline_seconds=deadline_seconds
    )[0]


def verify_batch(
    completions: Sequence[str],
    golds: Sequence[str],
    style: Style | str | Sequence[Style | str],
    *,
    prefilled: str = "",
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
) -> list[Verdict]:
    """The verdict on every completion, in order. Symbolic checks run side by side, each with its
    own deadline; equal checks run once."""
    timed = timed_verdicts(completions, golds, style, prefilled, deadline_seconds)
    return [verdict for verdict, _ in timed]


def timed_verdicts(
    completions: Sequence[str],
    golds: Sequence[str],
    style: Style | str | Sequence[Style | str],
    prefilled: str = "",
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
) -> list[tuple[Verdict, float]]:
    """As `verify_batch`, each verdict with the seconds it took: here and, from dispatch, in the
    engine (0 there for a check whose result was known)."""
    assert len(completions) == len(golds), "one gold per completion"
    if isinstance(style, str):
        styles = [as_style(style)] * len(completions)
    else:
        styles = [as_style(one) for one in style]
    assert len(styles) == len(completions), "one style per completion"
    looked: list[tuple[Verdict | Open, float]] = []
    for completion, gold, one in zip(completions, golds, styles, strict=True):
        start = time.perf_counter()
        look = first_look(completion, gold, one, prefilled)
        looked.append((look, time.perf_counter() - start))
    replies = engine_replies(
        list(dict.fromkeys(item.pair for item, _ in looked if isinstance(item, Open))),
        deadline_seconds,
    )
    return [
        (engine_verdict(item, replies[item.pair]), seconds + replies[item.pair][3])
        if isinstance(item, Open)
        else (item, seconds)
        for item, seconds in looked
    ]


def engine_replies(
    pairs: Sequence[tuple[str, str]], deadline_seconds: float
) -> dict[tuple[str, str], Reply]:
    """What the engine says of each pair of cleaned answers, from the cache or the pool."""
    replies = {pair: reply for pair in pairs if (reply := CACHE.get(pair)) is not None}
    missing = [pair for pair in pairs if pair not in replies]
    if missing:
        from ratchet.verifier.engine.pool import (
            shared_pool,  # only now: most batches need no engine
        )

        for pair, reply in zip(missing, shared_pool().run(missing, deadline_seconds), strict=True):
            replies[pair] = reply
            CACHE.put(pair, (*reply[:3], 0.0))
    return replies


def close_shared_pool() -> None:
    """End the worker processes of this process, if any; the next symbolic check starts new ones.
    Runs at exit by itself."""
    from ratchet.verifier.engine import pool

    pool.close_shared_pool()


def has_single_box(completion: str) -> bool:
    """Whether the answer after the reasoning holds exactly one box, closed and not empty."""
    text = after_reasoning(completion_text(completion))
    every = [] if text is None else boxes(text)
    return len(every) == 1 and bool((every[0].content or "").strip())
