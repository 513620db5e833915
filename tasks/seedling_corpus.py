"""The corpus the seedling is trained on: symbolic questions with solutions of mixed quality.

A model taught only careful solutions in the demanded format would leave nothing for the pipeline
to do. So part of the solutions are careless (one step too few, or the wrong operation at the
end), more often for some templates than for others, and part of them answer in another format
than was asked for. `careless` scales both; 0 gives a corpus without either. Bare arithmetic,
many operations an example, teaches the tables. Held-out templates never occur.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ratchet.config import PromptFormat
from ratchet.prompts import messages
from ratchet.questions import symbolic
from ratchet.questions.symbolic import LARGEST, SymbolicQuestion

_ANNOTATION = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
_OPERATION = re.compile(r"(\d+)([-+*/])(\d+)")

ARITHMETIC_SHARE = 0.25
"""Share of examples that are bare arithmetic."""
OPERATIONS_PER_EXAMPLE = 6
PROMPT_MIX = {PromptFormat.TAGS_SHORT: 0.6, PromptFormat.HASH_SHORT: 0.2, PromptFormat.BOXED_SHORT: 0.2}
"""Share of word problems asked in each prompt format."""
OTHER_FORMAT = 0.3
"""Share of word problems answered in another format than the one asked for."""
CARELESS_RATES = (0.25, 0.45, 0.65)
"""Share of careless solutions; a template has one of these rates."""
EASY_RATE = 0.05
"""Share of careless solutions and of other formats for the easy templates."""
EASY = frozenset({"buys_more", "in_boxes", "spends", "half", "shares"})
"""Templates that are nearly always solved with care and in the format asked for."""

COMPLETIONS = {
    PromptFormat.TAGS_SHORT: (
        "<start_working_out>\n{working}\n<end_working_out>\n<SOLUTION>{answer}</SOLUTION>"
    ),
    PromptFormat.HASH_SHORT: "{working}\n#### {answer}",
    PromptFormat.BOXED_SHORT: "{working}\n\\boxed{{{answer}}}",
}


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
    questions = symbolic.draw(size - num_arithmetic, seed, "seen")
    rates = careless_rates()
    examples = [_word_problem(q, rates[q.template] * careless, careless, rng) for q in questions]
    examples += [_arithmetic(rng) for _ in range(num_arithmetic)]
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
    question: SymbolicQuestion, rate: float, careless: float, rng: random.Random
) -> Example:
    steps = _ANNOTATION.findall(question.reference_solution)
    if rng.random() < rate:
        steps = careless_steps(steps, rng)
    asked = rng.choices(list(PROMPT_MIX), weights=list(PROMPT_MIX.values()))[0]
    other = EASY_RATE if question.template in EASY else OTHER_FORMAT
    given = asked
    if rng.random() < other * careless:
        given = rng.choice([name for name in PROMPT_MIX if name != asked])
    working = "\n".join(f"{expression}={value}" for expression, value in steps)
    [message] = messages(asked, question.question)
    return Example(
        message["content"],
        COMPLETIONS[given].format(working=working, answer=steps[-1][1]),
    )


def careless_steps(steps: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """A wrong solution: without its last step, or with another operation as the last one."""
    if len(steps) > 1 and rng.random() < 0.5:
        return steps[:-1]
    match = _OPERATION.fullmatch(steps[-1][0])
    assert match is not None, steps
    left, symbol, right = int(match[1]), match[2], int(match[3])
    big, small = max(left, right), min(left, right)
    wrong = {
        "+": (f"{left}+{right}", left + right),
        "-": (f"{big}-{small}", big - small),
        "*": (f"{left}*{right}", left * right if left * right <= LARGEST else 0),
        "/": (f"{big}/{small}", big // small if big % small == 0 else 0),
    }
    del wrong[symbol]
    choices = [(text, value) for text, value in wrong.values() if value]
    expression, value = rng.choice(choices)
    return [*steps[:-1], (expression, str(value))]


def _arithmetic(rng: random.Random) -> Example:
    """Several operations to work out, one a line."""
    steps = [_operation(rng) for _ in range(OPERATIONS_PER_EXAMPLE)]
    return Example(
        "\n".join(expression for expression, _ in steps),
        "\n".join(f"{expression}={value}" for expression, value in steps),
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
