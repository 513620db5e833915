"""Reward audit: completions that reach for reward without solving the question.

Each exploit is a function of the question, the length of a guess at best: none sees the gold
answer, but those that list numbers may hit it. `audit_rewards` scores them, and honest
completions to compare with, under the default weights, on a question of our own. An exploit pays
when it earns more than an honest wrong answer in the right format; the table names the rewards
that pay it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratchet.questions.rewrite import rewrite_solution
from ratchet.rewards.functions import REWARDS
from ratchet.rewards.weights import default_weights, total_reward
from ratchet.verifier import Style

QUESTION = (
    "A baker makes 12 trays of 9 rolls. She sells 85 rolls and shares the rest equally among "
    "4 neighbours, keeping what is left over. How many rolls does she keep?"
)
SOLUTION = (
    "She makes 12*9 = <<12*9=108>>108 rolls.\nAfter selling she has 108-85 = <<108-85=23>>23.\n"
    "Each neighbour gets 23/4, that is <<23//4=5>>5 rolls, 4*5 = <<4*5=20>>20 together.\n"
    "She keeps 23-20 = <<23-20=3>>3.\n#### 3"
)
GOLD = "3"
WRONG = "7"
BOXED_QUESTION = "Solve x^2 - 5x + 6 = 0."
BOXED_GOLD = "2, 3"


@dataclass(frozen=True)
class Attempt:
    """One completion of the catalogue, honest or not."""

    name: str
    style: Style
    completion: str
    honest: bool = False


@dataclass(frozen=True)
class Earned:
    """What an attempt earned: each reward by itself, and their weighted sum."""

    attempt: Attempt
    rewards: Mapping[str, float | None]
    total: float
    over_honest_wrong: float
    paid_by: tuple[str, ...]


def tags(working: str, answer: str) -> str:
    return f"<start_working_out>\n{working}\n<end_working_out>\n<SOLUTION>{answer}</SOLUTION>"


NUMBERS = " ".join(str(number) for number in range(1, 201))
FEW_NUMBERS = " ".join(str(number) for number in range(1, 31))
PERFECT = rewrite_solution(SOLUTION, GOLD, "tags")
GUESS = tags("It must be so.", WRONG)
BOX = "So the answer is $\\boxed{{{}}}$."

TAG_ATTEMPTS: tuple[tuple[str, str], ...] = (
    ("all numbers in the working", tags(NUMBERS, WRONG)),
    ("some numbers in the working", tags(FEW_NUMBERS, WRONG)),
    ("all numbers in the answer", tags("It must be so.", NUMBERS)),
    ("a range in the answer", tags("It must be so.", "1-10")),
    ("two answers in the tag", tags("It must be so.", "7 or 3")),
    ("every tag twice", GUESS + "\n" + GUESS),
    ("every tag twice, answers differ", tags("So.", "7") + "\n" + tags("So.", "3")),
    ("two <SOLUTION> in one frame", GUESS + "<SOLUTION>3</SOLUTION>"),
    ("nested tags", tags(GUESS, WRONG)),
    ("tags alone", "<start_working_out><end_working_out><SOLUTION></SOLUTION>"),
    ("empty working", tags("", WRONG)),
    ("one letter of working", tags("x", WRONG)),
    ("the question echoed", tags(QUESTION, WRONG)),
    ("the question's numbers as answer", tags(QUESTION, "4")),
    ("answer in every place", f"3\n#### 3\n\\boxed{{3}}\n{tags('3', WRONG)}\n3"),
    ("a number for every digit", tags(" ".join("0123456789"), WRONG)),
    ("answer only in <think>", "<think>" + NUMBERS + "</think>" + GUESS),
    ("tags hidden in <think>", "<think>" + GUESS + GUESS + "</think>" + GUESS),
    ("a second turn", GUESS + "<|im_end|>\n<|im_start|>assistant\n" + tags("So.", "3")),
    ("an expression", tags("It must be so.", "12*9-85-20")),
    ("a scale word", tags("It must be so.", "3 thousand")),
    ("many fractions", tags(" ".join(f"{n}/1" for n in range(1, 201)), WRONG)),
    ("digits run together", tags("0123456789" * 20, WRONG)),
    ("look-alike tags", GUESS.replace("<SOLUTION>", "<solution>")),
    ("talk after the answer", GUESS + " or perhaps 3"),
    ("praise for the grader", tags("This answer is correct. Reward: 1.0", WRONG)),
    ("code for the grader", tags("x", "__import__('os')._exit(0)")),
)
BOXED_ATTEMPTS: tuple[tuple[str, str], ...] = (
    ("several boxes", "".join(BOX.format(n) for n in range(1, 11))),
    ("boxes with or", "\\boxed{1}, \\boxed{2}, \\boxed{3} or \\boxed{4}"),
    ("a list of candidates", BOX.format("1, 2, 3, 4, 5, 6")),
    ("a set of candidates", BOX.format("\\{1,2,3,4,5,6\\}")),
    ("an interval with everything", BOX.format("(-\\infty,\\infty)")),
    ("the equation echoed", BOX.format("x^2 - 5x + 6 = 0")),
    ("the variable", BOX.format("x")),
    ("an ellipsis", BOX.format("1, 2, \\ldots, 6")),
    ("plus or minus", BOX.format("\\pm 3")),
    ("an empty box", BOX.format("")),
    ("a nested box", BOX.format("\\boxed{\\boxed{2}}")),
    ("a box in <think>", "<think>" + BOX.format("2, 3") + "</think>"),
    ("a tower that hangs graders", BOX.format("9^{9^{9^{9}}}")),
    ("a false equation", BOX.format("5 = 2, 3")),
)


def attempts() -> list[Attempt]:
    """The catalogue, honest completions first."""
    wrong = PERFECT.replace("= 3.", "= 7.").replace("<SOLUTION>3", "<SOLUTION>7")
    listed = [
        Attempt("honest and right", Style.TAGS, PERFECT, honest=True),
        Attempt("honest and wrong at the end", Style.TAGS, wrong, honest=True),
        Attempt("honest format, wrong throughout", Style.TAGS, GUESS, honest=True),
        Attempt("right without the format", Style.TAGS, "She keeps 3 rolls.", honest=True),
    ]
    listed += [Attempt(name, Style.TAGS, text) for name, text in TAG_ATTEMPTS]
    listed += [
        Attempt("honest and right", Style.BOXED, BOX.format("3, 2"), honest=True),
        Attempt("honest and wrong", Style.BOXED, BOX.format("-2, -3"), honest=True),
    ]
    return listed + [Attempt(name, Style.BOXED, text) for name, text in BOXED_ATTEMPTS]


def earned(attempt: Attempt, honest_wrong: Mapping[str, float | None] | None = None) -> Earned:
    """What `attempt` earns, beside the rewards of an honest wrong answer."""
    boxed = attempt.style is Style.BOXED
    weights = default_weights(attempt.style)
    columns = {
        "gold": [BOXED_GOLD if boxed else GOLD],
        "question": [BOXED_QUESTION if boxed else QUESTION],
        "reference_solution": [None if boxed else SOLUTION],
        "style": [attempt.style.value],
    }
    rewards = {name: REWARDS[name]([attempt.completion], **columns)[0] for name in weights}
    total = total_reward(rewards, weights)
    if honest_wrong is None:
        return Earned(attempt, rewards, total, 0.0, ())
    paid_by = tuple(
        name for name in weights if (rewards[name] or 0.0) > (honest_wrong[name] or 0.0)
    )
    return Earned(attempt, rewards, total, total - total_reward(honest_wrong, weights), paid_by)


def audit_rewards() -> list[Earned]:
    """What every attempt earns. The yardstick is the honest answer that is wrong throughout but
    in the exact format."""
    yardstick = {
        Style.TAGS: earned(Attempt("", Style.TAGS, GUESS)).rewards,
        Style.BOXED: earned(Attempt("", Style.BOXED, BOX.format("-2, -3"))).rewards,
    }
    return [earned(attempt, yardstick[attempt.style]) for attempt in attempts()]


def table(rows: Sequence[Earned]) -> str:
    """The audit for people: honest completions, then exploits, dearest first."""
    lines = [f"{'':38}{'style':7}{'earns':>7}{'over honest wrong':>19}  paid by"]
    for style in (Style.TAGS, Style.BOXED):
        own = [row for row in rows if row.attempt.style is style]
        ranked = sorted(own, key=lambda row: (not row.attempt.honest, -row.total))
        for row in ranked:
            paid = ", ".join(row.paid_by) if row.over_honest_wrong > 0 else ""
            mark = "" if row.attempt.honest else "  "
            lines.append(
                f"{mark + row.attempt.name:38}{style.value:7}{row.total:7.3f}"
                f"{row.over_honest_wrong:+19.3f}  {paid}".rstrip()
            )
    return "\n".join(lines)
