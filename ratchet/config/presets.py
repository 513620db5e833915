"""Preset files: TOML laid out like `RunConfig`; `extends` names the file that one starts from.

`extends = "base/gpu"` starts from a shipped preset, `extends = "mine.toml"` from a file beside the
one that says so. Tables are joined, so a preset shows only what it changes; any other value takes
the place of the base's, a list of sources as a whole. What `base/` holds is made to be extended.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.errors import UserError
from ratchet.places import PRESETS

EXTENDS = "extends"


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_gist(name: str) -> str:
    """The first comment line of a preset: what it is for."""
    first = (PRESETS / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def nearest(name: str, known: Sequence[str]) -> str:
    """'; did you mean …?' for the nearest known name; a full stop if none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else "."


def preset_path(preset: str, beside: Path = Path()) -> Path:
    """The file of a shipped preset, or `preset` itself, from folder `beside`, if it names a TOML
    file."""
    if preset.endswith(".toml"):
        path = beside / preset
        if not path.is_file():
            raise UserError(f"no configuration file {path.absolute()}")
        return path
    path = PRESETS / f"{preset}.toml"
    if not path.is_file():
        names = preset_names()
        bases = sorted(f"base/{file.stem}" for file in (PRESETS / "base").glob("*.toml"))
        raise UserError(
            f"no preset '{preset}'{nearest(preset, [*names, *bases])} Presets: {', '.join(names)}; "
            f"to extend, also {', '.join(bases)}; a path ending in .toml works too"
        )
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; UserError with file and line when it isn't TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: is it a preset?") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def read_chain(path: Path) -> list[dict[str, Any]]:
    """What a preset file and the files that it extends say, the outermost base first."""
    chain: list[dict[str, Any]] = []
    files: list[Path] = []
    while True:
        if path.resolve() in files:
            circle = " → ".join(file.name for file in [*files, path])
            raise UserError(f"{files[0]}: presets extend each other in a circle: {circle}")
        files.append(path.resolve())
        tree = read_toml(path)
        base = tree.pop(EXTENDS, None)
        if chain:
            tree.pop("name", None)  # a run is called after the preset that was asked for
        chain.insert(0, tree)
        if base is None:
            return chain
        if not isinstance(base, str):
            raise UserError(f'{path}: write {EXTENDS} = "PRESET" or {EXTENDS} = "FILE.toml"')
        try:
            path = preset_path(base, path.parent)
        except UserError as error:
            raise UserError(f"{path}: {EXTENDS} = '{base}': {error}") from None


def joined(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with what `over` says: tables are joined, anything else is replaced."""
    found = dict(base)
    for name, value in over.items():
        inner = base.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            found[name] = joined(inner, value)
        else:
            found[name] = value
    return found
