"""The version of a stage's code: a hash of its module and of every module of ours it imports.

Imports are followed statically, those inside functions included. Comments, docstrings and layout
don't count, so rewording a comment reuses what exists. What reaches a stage by value only
(configuration, store, planning, a stage's process) is left out: what it decides is in the key
already. So is what asks the machine for its memory and GPUs: it can refuse a stage, not change it.
`tests/ratchet/store/test_code.py` holds what counts for which stage, as a module that moves changes
keys.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ratchet.places import ROOT
from ratchet.store.keys import canonical_json, text_hash

OURS = ("ratchet", "tasks")
BY_VALUE = (
    "ratchet.config",
    "ratchet.errors",
    "ratchet.pipeline",
    "ratchet.places",
    "ratchet.resources",
    "ratchet.store",
    "tasks.runtime",
)
"""Packages and modules whose effect reaches a stage by value only."""
COUNTED = ("ratchet.store.schemas",)
"""Modules of those that count all the same: a table's columns are part of what a stage makes."""


def _is_by_value(module: str) -> bool:
    return module not in COUNTED and any(f"{module}.".startswith(f"{name}.") for name in BY_VALUE)


def _source_file(module: str) -> Path | None:
    """File of a module; None for a name that is no module (an imported function).

    Ours are found by path: asking the import system would import parent modules, torch and all.
    """
    if module.split(".")[0] not in OURS:  # a stage of a user's own
        spec = find_spec(module)
        return None if spec is None or spec.origin is None else Path(spec.origin)
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] in OURS}


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # Bare strings are docstrings, of attributes too; they have no effect.
            body = [
                item
                for item in node.body
                if not (
                    isinstance(item, ast.Expr)
                    and isinstance(item.value, ast.Constant)
                    and isinstance(item.value.value, str)
                )
            ]
            node.body = body or [ast.Pass()]
    return tree


@cache
def _module_parts(module: str) -> tuple[str, frozenset[str]] | None:
    """(hash of the module's code, names it imports from us); None if it is no module."""
    path = _source_file(module)
    if path is None:
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = frozenset(_imports(tree))
    return text_hash(ast.unparse(_without_docstrings(tree))), imports


@cache
def covered(module: str) -> dict[str, str]:
    """Hash by name of the modules that count for the code behind `module`."""
    hashes: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        # The top packages hold a version at most.
        if name in hashes or name in OURS or _is_by_value(name):
            continue
        parts = _module_parts(name)
        if parts is None:
            continue
        hashes[name], imports = parts
        todo.extend(imports)
    assert module in hashes, f"there is no module {module}, or it reaches stages by value"
    return hashes


def code_version(module: str) -> str:
    """Version of the code behind `module`, 16 hexadecimal digits."""
    return text_hash(canonical_json(covered(module)))[:16]
