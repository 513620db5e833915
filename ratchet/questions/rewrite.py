r"""A GSM8K-style solution in the layout of an answer style.

The annotations (`<<48/2=24>>`) and the final `#### 24` line go; the working keeps its lines, each
stripped, empty ones dropped. Layouts (␤ is one newline; no newline at the end):

    tags   <start_working_out>␤working␤<end_working_out>␤<SOLUTION>24</SOLUTION>
    hash   working␤#### 24
    boxed  working␤\boxed{24}
    plain  working␤24

The answer is `gold`, without thousands commas where it is a number.
"""

from __future__ import annotations

import re

from ratchet.verifier.answers.numbers import read_number
from ratchet.verifier.extract import (
    SOLUTION_CLOSE,
    SOLUTION_OPEN,
    WORKING_CLOSE,
    WORKING_OPEN,
)
from ratchet.verifier.types import Style, as_style

ANNOTATION = re.compile(r"<<[^<>]*>>")
GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+")


def working_lines(solution: str) -> str:
    """The working of a GSM8K-style solution, one step a line."""
    body = ANNOTATION.sub("", solution.split("\n####", 1)[0])
    return "\n".join(line.strip() for line in body.splitlines() if line.strip())


def rewrite_solution(solution: str, gold: str, style: Style | str) -> str:
    """`solution` with answer `gold` in the layout of `style`."""
    answer = gold.strip()
    if GROUPED.fullmatch(answer):
        answer = str(read_number(answer))
    working = working_lines(solution)
    match as_style(style):
        case Style.TAGS:
            return (
                f"{WORKING_OPEN}\n{working}\n{WORKING_CLOSE}\n"
                f"{SOLUTION_OPEN}{answer}{SOLUTION_CLOSE}"
            )
        case Style.HASH:
            return f"{working}\n#### {answer}"
        case Style.BOXED:
            return f"{working}\n\\boxed{{{answer}}}"
        case Style.PLAIN:
            return f"{working}\n{answer}"
