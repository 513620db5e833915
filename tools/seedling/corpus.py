"""The corpus the seedling is trained on: symbolic questions with solutions of mixed quality.

A model taught only careful solutions in the demanded format would leave nothing for the pipeline
to do. So many solutions are careless (they stop a step early, or where there is one step only
take the wrong operation), for some templates more often than for others, and part of them answer
in another format than was asked for. `careless` scales both; 0 gives a corpus without either.
Random stories teach to read clauses in any succession, bare arithmetic teaches the tables.
Held-out templates never occur.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ratchet.config.run import PromptFormat
from ratchet.prompts import STYLE_OF, messages
from ratchet.questions import symbolic
from ratchet.questions.rewrite import rewrite_solution
from ratchet.questions.symbolic import LARGEST, NotWholeError
from tools.seedling import stories as seedling_stories

Steps = list[tuple[str, int]]
"""A solution: (operation, result) for each step."""

ARITHMETIC_SHARE = 0.2
"""Share of examples that are bare arithmetic."""
STORY_SHARE = 0.35
"""Share of examples that are random stories."""
OPERATIONS_PER_EXAMPLE = 6
PROMPT_MIX = {
    PromptFormat.TAGS_SHORT: 0.6,
    PromptFormat.HASH_SHORT: 0.2,
    PromptFormat.BOXED_SHORT: 0.2,
}
"""Share of word problems asked in each prompt format."""
OTHER_FORMAT = 0.3
"""Share of word problems answered in another format than the one asked for."""
CARELESS_RATES = (0.25, 0.6, 0.7, 0.93)
"""Share of careless solutions; a template has one of these rates."""
STORY_RATE = 0.6
"""Share of careless solutions to stories."""
EASY_RATE = 0.05
"""Share of careless solutions and of other formats for the easy templates."""
EASY = frozenset({"buys_more", "in_boxes", "spends", "half", "shares"})
"""Templates that are nearly always solved with care and in the format asked for."""

_ANNOTATION = re.compile(r"<<([^=<>]+)=(\d+)>>")
_OPERATION = re.compile(r"(\d+)([-+*/])(\d+)")


@dataclass(frozen=True)
class Example:
    """One user message and the answer to learn."""

    user: str
    assistant: str


def corpus(size: int, seed: int, careless: float = 1.0) -> list[Example]:
    """`size` examples in random order. `careless` from 0 to 1 scales careless solutions and
    answers in another format than asked for."""
    rng = random.Random(seed)
    num_arithmetic = round(size * ARITHMETIC_SHARE)
    num_stories = round(size * STORY_SHARE)
    examples = [_arithmetic(rng) for _ in range(num_arithmetic)]
    for _ in range(num_stories):
        question, steps = seedling_stories.tell(rng)
        examples.append(
            _word_problem(question, steps, STORY_RATE * careless, OTHER_FORMAT * careless, rng)
        )
    rates = careless_rates()
    for drawn in symbolic.draw(size - len(examples), seed, "seen"):
        steps = [
            (text, int(value)) for text, value in _ANNOTATION.findall(drawn.reference_solution)
        ]
        other = EASY_RATE if drawn.template in EASY else OTHER_FORMAT
        examples.append(
            _word_problem(
                drawn.question, steps, rates[drawn.template] * careless, other * careless, rng
            )
        )
    rng.shuffle(examples)
    return examples


def careless_rates() -> dict[str, float]:
    """Share of careless solutions by template, spread evenly over the templates of each length."""
    rates: dict[str, float] = {}
    hard = 0
    for template in symbolic.load_templates():
        if template.heldout:
            continue
        if template.name in EASY:
            rates[template.name] = EASY_RATE
        else:
            rates[template.name] = CARELESS_RATES[hard % len(CARELESS_RATES)]
            hard += 1
    return rates


def _word_problem(
    question: str, steps: Steps, careless: float, other_format: float, rng: random.Random
) -> Example:
    """`question` in a drawn prompt format; `careless` and `other_format` are probabilities."""
    if rng.random() < careless:
        steps = careless_steps(steps, rng)
    asked = rng.choices(list(PROMPT_MIX), weights=list(PROMPT_MIX.values()))[0]
    given = asked
    if rng.random() < other_format:
        given = rng.choice([name for name in PROMPT_MIX if name != asked])
    lines = [f"{operation}=<<{operation}={value}>>{value}" for operation, value in steps]
    gold = str(steps[-1][1])
    solution = "\n".join([*lines, f"#### {gold}"])
    [message] = messages(asked, question)
    return Example(message["content"], rewrite_solution(solution, gold, STYLE_OF[given]))


def careless_steps(steps: Steps, rng: random.Random) -> Steps:
    """A wrong solution: one step too few, or another operation where there is one step only."""
    if len(steps) > 1:
        return steps[:-1]
    match = _OPERATION.fullmatch(steps[0][0])
    assert match is not None, steps
    numbers = sorted((int(match[1]), int(match[3])), reverse=True)
    wrong: Steps = []
    for symbol in "+-*/":
        try:
            value = symbolic.apply(numbers[0], symbol, numbers[1])
        except NotWholeError:
            continue
        if symbol != match[2] and value > 0 and (symbol == "+" or value <= LARGEST):
            wrong.append((f"{numbers[0]}{symbol}{numbers[1]}", value))
    return [rng.choice(wrong)]


def _arithmetic(rng: random.Random) -> Example:
    """Several operations to work out, one a line."""
    steps = [_operation(rng) for _ in range(OPERATIONS_PER_EXAMPLE)]
    return Example(
        "\n".join(operation for operation, _ in steps),
        "\n".join(f"{operation}={value}" for operation, value in steps),
    )


def _operation(rng: random.Random) -> tuple[str, int]:
    symbol = rng.choice("+-*/")
    if symbol == "+":
        total = rng.randint(5, LARGEST)
        left = rng.randint(1, total - 1)
        return f"{left}+{total - left}", total
    if symbol == "-":
        left = rng.randint(5, LARGEST)
        right = rng.randint(1, left - 1)
        return f"{left}-{right}", left - right
    left, right = rng.randint(2, 12), rng.randint(2, 9)
    if symbol == "*":
        return (f"{left}*{right}" if rng.random() < 0.5 else f"{right}*{left}"), left * right
    return f"{left * right}/{right}", left
