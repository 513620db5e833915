"""The page's template and style sheet, which are part of what the report's key covers."""

from __future__ import annotations

from pathlib import Path

from ratchet.store.keys import canonical_json, file_hash, text_hash

FOLDER = Path(__file__).parent
PAGE, STYLE = "page.html", "style.css"


def fingerprint(folder: Path = FOLDER) -> str:
    """Changes whenever the template or the style sheet does."""
    return text_hash(canonical_json({name: file_hash(folder / name) for name in (PAGE, STYLE)}))
