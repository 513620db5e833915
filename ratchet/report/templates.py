"""The page's template and style sheet, which are part of what the report's key covers."""

from __future__ import annotations

import re
from pathlib import Path

from ratchet.store.keys import canonical_json, file_hash, text_hash

FOLDER = Path(__file__).parent
PAGE, STYLE = "page.html", "style.css"


def fingerprint(folder: Path = FOLDER) -> str:
    """Changes whenever the template or the style sheet does."""
    return text_hash(canonical_json({name: file_hash(folder / name) for name in (PAGE, STYLE)}))


def colours() -> dict[str, str]:
    """The style sheet's variables, light theme."""
    css = (FOLDER / STYLE).read_text(encoding="utf-8")
    return dict(re.findall(r"(--[\w-]+):\s*([^;]+);", css[: css.index("@media")]))


def standalone(svg: str) -> str:
    """A figure of the page as an SVG file of its own, in the page's light colours; places to a
    hundredth of a point."""
    found = colours()
    svg = svg.replace("var(--sans)", "sans-serif")
    svg = re.sub(r"var\((--[\w-]+)\)", lambda match: found[match[1]], svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return svg.replace("<svg", f'<svg {spaces} style="background:{found["--paper"]}"', 1)
