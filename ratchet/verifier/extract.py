"""Find the answer in a completion: end of turn, reasoning, tags, `####`, boxes, last number.

Everything is a scan that is linear in the text. Nothing here judges; `Found` says what stands
where the format wants the answer, whether the format was kept exactly, and why not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ratchet.verifier.answers.numbers import number_tokens, plain_chars, read_number

END_OF_TURN = (
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end|>",
    "<|user|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<start_of_turn>",
    "<eos>",
    "</s>",
)
TURN_MARKS = ("<|", "<｜", "<end_of_turn", "<start_of_turn", "<eos", "</s")
WORKING_OPEN, WORKING_CLOSE = "<start_working_out>", "<end_working_out>"
SOLUTION_OPEN, SOLUTION_CLOSE = "<SOLUTION>", "</SOLUTION>"
TAGS = (WORKING_OPEN, WORKING_CLOSE, SOLUTION_OPEN, SOLUTION_CLOSE)

BRACES = re.compile(r"\\{1,3}(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
BARE_BOX = re.compile(r"\s*(-?[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?)(?![0-9A-Za-z^{/])")
HEADING = re.compile(r"\s*(?:[^\W\d_]|$)")
MAX_JOINT = 80
JOINT_DRESS = re.compile(
    r"\\(?:text|mbox|mathrm|textbf) *\{([^{}]*)\}|\\q?quad(?![A-Za-z])|\\[,;: \[\]()]|[$~*]"
)
JOINT = re.compile(
    r"(?:[a-z]+ ?){0,2}(?:[,;&/]|,? ?\b(?:and|or)\b)?"
    r"(?: ?[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))? ?=)?"
)
LAST_FRACTION = re.compile(
    r"((?<![0-9.^_])-? ?[0-9]* ?)\\[dtc]?frac *\{ *(-?[0-9]+) *\}\{ *([0-9]+) *\}$"
)
SPACED_GROUPS = re.compile(r"(?<![0-9.,])-?[1-9][0-9]{0,2}(?: [0-9]{3})+$")
RETRACTS = set(
    """no not wait but actually so then thus hence therefore finally correct is are was wrong
    instead rather sorry now giving gives get""".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Found:
    """Where the answer stands. `answer` is None when it cannot be read; `why` says why."""

    answer: str | None
    exact: bool
    why: str = ""


def completion_text(completion: str) -> str:
    """`completion` cut at the first end-of-turn mark."""
    if not any(mark in completion for mark in TURN_MARKS):
        return completion
    ends = [at for mark in END_OF_TURN if (at := completion.find(mark)) >= 0]
    return completion[: min(ends)] if ends else completion


def after_reasoning(text: str) -> str | None:
    """What follows the last `</think>`; None when a `<think>` is left open."""
    close = text.rfind("</think>")
    if close >= 0:
        text = text[close + len("</think>") :]
    return None if "<think>" in text else text


def between(text: str, opening: str, closing: str) -> str | None:
    """The text between `opening` and the `closing` after it, or None."""
    start = text.find(opening)
    if start < 0:
        return None
    start += len(opening)
    end = text.find(closing, start)
    return None if end < 0 else text[start:end]


def exact_tags(text: str) -> bool:
    """Whether the four tags stand once each, in order, round non-empty working, with nothing but
    white space outside."""
    at = 0
    parts = []
    for tag in TAGS:
        found = text.find(tag, at)
        if found < 0:
            return False
        parts.append(text[at:found])
        at = found + len(tag)
    before, working, gap, answer = parts
    return (
        not (before.strip() or gap.strip() or text[at:].strip())
        and bool(plain_chars(working).strip())
        and bool(answer.strip())
        and all(text.count(tag) == 1 for tag in TAGS)
    )


def solution_text(text: str) -> str | None:
    """What stands in `<SOLUTION>`, or None unless there is exactly one pair in order."""
    if text.count(SOLUTION_OPEN) != 1 or text.count(SOLUTION_CLOSE) != 1:
        return None
    return between(text, SOLUTION_OPEN, SOLUTION_CLOSE)


def left_open(text: str) -> str | None:
    """An opening tag of the tag format with no closing tag after it, or None."""
    for opening, closing in ((WORKING_OPEN, WORKING_CLOSE), (SOLUTION_OPEN, SOLUTION_CLOSE)):
        last = text.rfind(opening)
        if last >= 0 and text.find(closing, last) < 0:
            return opening
    return None


def find_tags(text: str) -> Found:
    """The answer in `<SOLUTION>`; without that tag, as in running text. An open tag, a second
    `<SOLUTION>` or anything but one number inside it is a failure, never a fallback."""
    opened = left_open(text)
    if opened is not None:
        return Found(None, False, f"{opened} is never closed")
    if SOLUTION_OPEN not in text:
        return replace(find_plain(text), exact=False)
    answer = solution_text(text)
    if answer is None:
        return Found(None, False, "more than one <SOLUTION>")
    if read_number(answer) is None:
        return Found(None, False, "<SOLUTION> does not hold exactly one number")
    return Found(answer.strip(), exact_tags(text))


def last_marker(text: str) -> int:
    """Position after the last `####` that is no heading, or -1."""
    at = len(text)
    while (at := text.rfind("####", 0, at)) >= 0:
        end = at + 4
        line = text[end : end + 240].lstrip().split("\n", 1)[0]
        if line and not HEADING.match(line.lstrip("#* ")):
            return end
    return -1


def find_hash(text: str) -> Found:
    """The number after the last `####`; without one, as in running text. Exact means one marker,
    text before it, and nothing after the number."""
    marker = last_marker(text)
    if marker < 0:
        return replace(find_plain(text), exact=False)
    tail = text[marker:].strip()
    answer, _, rest = tail.partition("\n")
    if read_number(answer) is None:
        return Found(None, False, "#### is not followed by exactly one number")
    working = text[: marker - 4]
    alone = text.count("####") == 1 and not rest.strip() and not working.endswith("#")
    return Found(answer.strip(), alone and bool(working.strip()))


def find_plain(text: str) -> Found:
    """The answer in free text: the text itself if it is a number, else the later of the last
    `####` and the last box, else the last number."""
    if len(text) <= 200 and read_number(text) is not None:
        return Found(text.strip(), True)
    marker = last_marker(text)
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if marker > box:
        answer = text[marker:].strip().split("\n", 1)[0]
        if read_number(answer) is None:
            return Found(None, False, "#### is not followed by exactly one number")
        return Found(answer.strip(), True)
    if box >= 0:
        found = find_boxed(text)
        if found.answer is None:
            return found
        if read_number(found.answer) is None:
            return Found(None, False, "the box does not hold exactly one number")
        return Found(found.answer, True)
    return last_number(text)


def last_number(text: str) -> Found:
    """The last number of running text."""
    text = plain_chars(text)
    window = 2000
    while True:  # look at the end first: completions are long
        cut = max(0, text.find(" ", len(text) - window)) if window < len(text) else 0
        tokens = number_tokens(text, cut)
        if tokens or not cut:
            break
        window *= 16
    if not tokens:
        return Found(None, False, "no number")
    end, token = tokens[-1]
    after = text[end : end + 3]
    if after.startswith("^") or (after.startswith("**") and after[2:].isdigit()):
        return Found(None, False, "the last number is part of an expression")
    before = text[max(0, end - 60) : end - len(token.removeprefix("-"))]
    if re.search(r"[0-9][:.]\Z", before):
        return Found(None, False, "the last number is part of a time, ratio or date")
    token = whole_token(text[max(0, end - 60) : end + 1], token.rstrip(".,"))
    if read_number(token) is None:
        return Found(None, False, "the last number is malformed")
    return Found(token, True)


def whole_token(ending: str, token: str) -> str:
    """`token`, or the LaTeX fraction or the spaced groups that it ends. `ending` is the text up
    to one character after the token."""
    fraction = LAST_FRACTION.search(ending)
    if fraction:
        return f"{fraction[1].strip()}\\frac{{{fraction[2]}}}{{{fraction[3]}}}"
    groups = SPACED_GROUPS.search(ending[:-1] if not ending[-1:].isdigit() else ending)
    return groups[0] if groups else token


@dataclass(frozen=True, slots=True)
class Box:
    """One outermost box: where it starts and ends, and its content (None if never closed)."""

    start: int
    end: int
    content: str | None


def boxes(text: str) -> list[Box]:
    """The outermost \\boxed{} and \\fbox{} in order. A box without braces takes a number.
    The last box that is opened and never closed comes with content None. A command whose
    backslash was doubled counts; one that is only named in prose does not."""
    found: list[Box] = []
    stack: list[tuple[int, int]] = []  # (start of the box command or -1, position after "{")
    pending = -1  # a box command whose brace has not come yet
    for match in BRACES.finditer(text):
        token = match[0]
        if token.endswith(("box", "boxed")):
            pending = match.start()
            bare = BARE_BOX.match(text, match.end())
            if bare and not any(start >= 0 for start, _ in stack):
                found.append(Box(pending, bare.end(), bare[1]))
                pending = -1
        elif token == "{":
            is_box = pending >= 0 and is_box_command(text[pending : match.start()])
            stack.append((pending if is_box else -1, match.end()))
            pending = -1
        elif token == "}" and stack:
            start, inside = stack.pop()
            if start >= 0:
                while found and found[-1].start > start:
                    found.pop()
                found.append(Box(start, match.end(), text[inside : match.start()]))
    if pending >= 0 and not is_box_command(text[pending:]):
        pending = -1
    opened = max([start for start, _ in stack] + [pending])
    if opened >= 0 and (not found or opened > found[-1].start):
        found.append(Box(opened, len(text), None))
    return found


def is_box_command(text: str) -> bool:
    """Whether `text` is a box command and white space."""
    return text.rstrip().lstrip("\\") in ("boxed", "fbox")


def joins(between_boxes: str) -> bool:
    """Whether the text between two boxes makes them one answer in two boxes."""
    if len(between_boxes) > MAX_JOINT:
        return False
    bare = JOINT_DRESS.sub(lambda match: f" {match[1] or ''} ", between_boxes)
    bare = " ".join(bare.split())
    if any(word in RETRACTS for word in bare.lower().split()):
        return False
    if not bare:
        return True
    return (
        JOINT.fullmatch(bare) is not None and re.search(r"[,;&/]|\b(?:and|or)\b", bare) is not None
    )


def find_boxed(text: str) -> Found:
    """The content of the last box. Boxes joined by a comma, "and" or "or" are one list; a last
    box that is empty or never closed is a failure. The last box is the demanded format; that it
    is the only one is paid for by the reward `boxed_format`."""
    every = boxes(text)
    if not every:
        return Found(None, False, "no \\boxed{}")
    if every[-1].content is None:
        return Found(None, False, "the last \\boxed is never closed")
    group = [every[-1]]
    for box in reversed(every[:-1]):
        if box.content is None or not joins(text[box.end : group[0].start]):
            break
        group.insert(0, box)
    contents = list(dict.fromkeys(unnest(box.content or "") for box in group))
    if not all(contents):
        return Found(None, False, "the last \\boxed{} is empty")
    answer = contents[0] if len(contents) == 1 else ", ".join(contents)
    if "\\boxed" in answer or "\\fbox" in answer:
        return Found(None, False, "boxes nested more than once")
    return Found(answer, True)


def unnest(content: str) -> str:
    """`content` without a box that is all of it."""
    content = content.strip()
    inner = boxes(content) if content.startswith(("\\boxed", "\\fbox")) else []
    if len(inner) == 1 and inner[0].end == len(content) and inner[0].content is not None:
        return inner[0].content.strip()
    return content
