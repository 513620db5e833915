"""Markdown as the Prefect UI shows it: narrow, without HTML, code blocks hard to read.

So code is inline code, a line each, and what must stay on one line says so with no-break spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

RUN_PATH = "/v2/runs/flow-run"
BAR = 20
NO_BREAK = "\u00a0"
FENCE = re.compile(r"^(`{3,})[^\n]*\n(.*?)\n\1`*$", re.MULTILINE | re.DOTALL)


def cell(text: str) -> str:
    """Text for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def whole(text: str) -> str:
    """Text that is not broken over lines."""
    return text.replace(" ", NO_BREAK)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines, with an empty one after it; the cells' text is taken as Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return [*lines, ""]


def run_address(flow_run_id: str) -> str:
    """Where the UI shows a flow run, with what it published opened."""
    return f"{RUN_PATH}/{flow_run_id}?tab=Artifacts"


def linked(text: str, flow_run_id: str | None) -> str:
    """Text that leads to a flow run, or plain text without one."""
    return text if flow_run_id is None else f"[{text}]({run_address(flow_run_id)})"


def code(lines: Iterable[str]) -> str:
    """Lines of code or of a log, spaces kept."""
    shown = []
    for line in lines:
        fence = "``" if "`" in line else "`"
        padding = " " if "`" in line else ""
        shown.append(f"{fence}{padding}{whole(line)}{padding}{fence}" if line.strip() else "")
    return "  \n".join(shown)


def without_code_blocks(markdown: str) -> str:
    """Markdown whose code blocks have become lines of inline code."""
    return FENCE.sub(lambda found: code(found[2].splitlines()), markdown)


def bar(share: float) -> str:
    """A share, 0 to 1, as a bar of text with its value."""
    full = round(BAR * share)
    return f"`{'█' * full}{'░' * (BAR - full)}` {100 * share:.1f}%"
