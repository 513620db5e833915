"""Reward functions: text in, one float (or None for "does not apply") per completion out.

They follow TRL's contract, `f(completions, **columns) -> list[float | None]`, where a completion is
a string or a list of chat messages. The columns they read are `gold`, `question`,
`reference_solution` (with `<<a=b>>` annotations; may be None or empty) and `style`. All are plain
functions of the text, so a reward can be recomputed from a stored table at any time.

A gold answer that cannot be read gives None, never a reward. What each style means:

reward                     tags                            hash                      boxed / plain
exact_check                strict verdict                  strict verdict            strict verdict
correctness_check          number in <SOLUTION> right      number after #### right   lenient verdict
lenient_correctness_check  right number anywhere           right number anywhere     lenient verdict
format_check               exact tag structure             one #### number at end    one box / None
tag_check                  1/8 per tag that stands once    None                      None
step_check                 intermediate results reached    the same                  the same
solution_number_check      <SOLUTION> is a bare number     #### is a bare number     None
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ratchet.verifier import Status, Style, as_style, verify_batch
from ratchet.verifier.answers.numbers import (
    Value,
    count_numbers,
    is_bare_number,
    magnitude,
    read_number,
    values_in,
)
from ratchet.verifier.extract import (
    SOLUTION_OPEN,
    TAGS,
    WORKING_CLOSE,
    WORKING_OPEN,
    after_reasoning,
    between,
    completion_text,
    exact_tags,
    last_marker,
    solution_text,
)
from ratchet.verifier.verify import gold_number, has_single_box

RewardFunction = Callable[..., list[float | None]]
Completion = str | Sequence[Mapping[str, Any]]

# A real solution names its quantities more than once, and a wrong step or a numbered list brings
# in a few of its own. Beyond these `step_check` shrinks with the square of the excess.
NUMBERS_PER_REFERENCE_NUMBER = 2
SPARE_NUMBERS = 8
SPARE_STRAY_VALUES = 4
ANNOTATION = re.compile(r"<<[^<>]*?=([^<>=]*)>>")


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


@lru_cache(maxsize=16_384)
def scored_text(completion: str) -> str:
    """What is scored: up to the end of the turn, after the reasoning ("" if that never ends)."""
    return after_reasoning(completion_text(completion)) or ""


def texts(completions: Sequence[Completion]) -> list[str]:
    return [scored_text(text_of(completion)) for completion in completions]


@lru_cache(maxsize=16_384)
def wanted(gold: str) -> Value | None:
    return gold_number(gold)


def verdict_rewards(
    completions: Sequence[Completion], gold: Sequence[str], style: Sequence[str], strict: bool
) -> list[float | None]:
    """1 or 0 by the strict or lenient verdict; None where the gold cannot be read."""
    verdicts = verify_batch([text_of(completion) for completion in completions], gold, list(style))
    return [
        None
        if verdict.status is Status.GOLD_UNPARSEABLE
        else float(verdict.strict if strict else verdict.lenient)
        for verdict in verdicts
    ]


def exact_check(
    completions: Sequence[Completion], gold: Sequence[str], style: Sequence[str], **_: Any
) -> list[float | None]:
    """1 if the format is exact and the answer right."""
    return verdict_rewards(completions, gold, style, strict=True)


def placed_answer(text: str, style: Style) -> str | None:
    """The text where a tags or hash answer must stand, or None."""
    if style is Style.TAGS:
        return solution_text(text)
    marker = last_marker(text)
    return None if marker < 0 else text[marker:].strip().split("\n", 1)[0]


def correctness_check(
    completions: Sequence[Completion], gold: Sequence[str], style: Sequence[str], **_: Any
) -> list[float | None]:
    """1 if the number where the answer must stand is right, whatever surrounds it."""
    styles = [as_style(one) for one in style]
    out: list[float | None] = [None] * len(styles)
    symbolic = [i for i, one in enumerate(styles) if one not in (Style.TAGS, Style.HASH)]
    judged = verdict_rewards(
        [completions[i] for i in symbolic],
        [gold[i] for i in symbolic],
        [styles[i] for i in symbolic],
        strict=False,
    )
    for i, reward in zip(symbolic, judged, strict=True):
        out[i] = reward
    for i, (text, one) in enumerate(zip(texts(completions), styles, strict=True)):
        value = wanted(gold[i])
        if one in (Style.TAGS, Style.HASH) and value is not None:
            answer = placed_answer(text, one)
            out[i] = float(answer is not None and read_number(answer) == value)
    return out


def lenient_correctness_check(
    completions: Sequence[Completion], gold: Sequence[str], style: Sequence[str], **_: Any
) -> list[float | None]:
    """1 if the right number appears anywhere (boxed answers: if the verdict is right)."""
    styles = [as_style(one) for one in style]
    boxed = [i for i, one in enumerate(styles) if one is Style.BOXED]
    judged = iter(
        verdict_rewards(
            [completions[i] for i in boxed], [gold[i] for i in boxed], ["boxed"] * len(boxed), False
        )
    )
    out: list[float | None] = []
    for text, answer, one in zip(texts(completions), gold, styles, strict=True):
        value = wanted(answer)
        if one is Style.BOXED:
            out.append(next(judged))
        else:
            out.append(None if value is None else float(value in values_in(text)))
    return out


def magnitudes(text: str) -> set[Value]:
    return {magnitude(value) for value in values_in(text)}


def format_check(
    completions: Sequence[Completion], style: Sequence[str], **_: Any
) -> list[float | None]:
    """1 for the exact structure of the format, whatever the answer."""
    out: list[float | None] = []
    for completion, text, name in zip(completions, texts(completions), style, strict=True):
        one = as_style(name)
        if one is Style.TAGS:
            out.append(float(exact_tags(text)))
        elif one is Style.HASH:
            out.append(float(exact_hash(text)))
        elif one is Style.BOXED:
            out.append(float(has_single_box(text_of(completion))))
        else:
            out.append(None)
    return out


def exact_hash(text: str) -> bool:
    """Whether the text is working, one ####, one number, and nothing else."""
    working, marker, answer = text.partition("####")
    return bool(marker) and bool(working.strip()) and read_number(answer) is not None


def tag_check(
    completions: Sequence[Completion], style: Sequence[str], **_: Any
) -> list[float | None]:
    """0.125 for each of the four tags that stands exactly once."""
    return [
        0.125 * sum(text.count(tag) == 1 for tag in TAGS) if as_style(name) is Style.TAGS else None
        for text, name in zip(texts(completions), style, strict=True)
    ]


@dataclass(frozen=True)
class Steps:
    """What a reference solution says about the working. Values are magnitudes, since "w-10" may
    state the result -10."""

    results: frozenset[Value]
    """Results of annotated steps that are neither the answer nor given in the question."""
    known: frozenset[Value]
    """Every value in the question and the solution."""
    num_numbers: int
    """How many numbers the solution holds."""


@lru_cache(maxsize=65_536)
def steps_of(question: str, solution: str, gold: str) -> Steps:
    """The steps of an annotated reference solution."""
    results: set[Value] = set()
    for match in ANNOTATION.finditer(solution):
        value = read_number(match[1])
        if value is not None:
            results.add(magnitude(value))
    answer = magnitude(wanted(gold) or 0)
    given = magnitudes(question) | {answer}
    body = ANNOTATION.sub("", solution).rpartition("####")[0]
    return Steps(
        frozenset(results - given),
        frozenset(results | given | magnitudes(body)),
        count_numbers(body),
    )


def reasoning_of(text: str, style: Style) -> str:
    """The part of a completion that holds the working."""
    if style is Style.TAGS:
        return between(text, WORKING_OPEN, WORKING_CLOSE) or text.partition(SOLUTION_OPEN)[0]
    if style is Style.HASH:
        return text.partition("####")[0]
    return text


def step_check(
    completions: Sequence[Completion],
    gold: Sequence[str],
    question: Sequence[str],
    reference_solution: Sequence[str | None],
    style: Sequence[str],
    **_: Any,
) -> list[float | None]:
    """Share of the reference solution's intermediate results that the working reaches, shrunk
    when the completion holds far more numbers, or far more values that neither question nor
    solution know, than a solution would. None where there are no such results."""
    out: list[float | None] = []
    for i, text in enumerate(texts(completions)):
        steps = steps_of(question[i], reference_solution[i] or "", gold[i])
        if not steps.results:
            out.append(None)
            continue
        found = magnitudes(reasoning_of(text, as_style(style[i])))
        share = len(steps.results & found) / len(steps.results)
        out.append(share * restraint(text, found, steps) if share else 0.0)
    return out


def restraint(text: str, found: set[Value], steps: Steps) -> float:
    """1 for a completion with no more numbers than a solution would hold, less for more."""
    numbers = count_numbers(text)
    stray = len(found - steps.known)
    allowed = NUMBERS_PER_REFERENCE_NUMBER * steps.num_numbers + SPARE_NUMBERS
    allowed_stray = SPARE_STRAY_VALUES + len(steps.results)
    excess = max(1.0, numbers / allowed, stray / allowed_stray)
    return excess**-2


def solution_number_check(
    completions: Sequence[Completion], style: Sequence[str], **_: Any
) -> list[float | None]:
    """1 if just a number stands where the answer must."""
    out: list[float | None] = []
    for text, name in zip(texts(completions), style, strict=True):
        one = as_style(name)
        if one not in (Style.TAGS, Style.HASH):
            out.append(None)
            continue
        answer = placed_answer(text, one)
        out.append(float(answer is not None and is_bare_number(answer)))
    return out


def boxed_correctness(
    completions: Sequence[Completion], gold: Sequence[str], style: Sequence[str], **_: Any
) -> list[float | None]:
    """1 if the verdict on the answer is right."""
    return verdict_rewards(completions, gold, style, strict=False)


def boxed_format(completions: Sequence[Completion], **_: Any) -> list[float | None]:
    """1 for exactly one \\boxed{} that is closed and not empty."""
    return [float(has_single_box(text_of(completion))) for completion in completions]


REWARDS: dict[str, RewardFunction] = {
    "exact_check": exact_check,
    "correctness_check": correctness_check,
    "lenient_correctness_check": lenient_correctness_check,
    "format_check": format_check,
    "tag_check": tag_check,
    "step_check": step_check,
    "solution_number_check": solution_number_check,
    "boxed_correctness": boxed_correctness,
    "boxed_format": boxed_format,
}
