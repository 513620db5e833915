"""The version of a stage's code: a hash of its module and of every module of ours it imports.

Imports are followed statically, those inside functions included. Comments, docstrings and layout
don't count, so rewording a comment reuses what exists. Modules whose effect reaches a stage by
value only (configuration, store, command line, stage plumbing) are left out: what they decide
is in the key already.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from ratchet.places import ROOT
from ratchet.store.keys import canonical_json, text_hash

OURS = ("ratchet", "tasks")
BY_VALUE = (
    "ratchet.config.run",
    "ratchet.config.base",
    "ratchet.config.evaluate",
    "ratchet.config.load",
    "ratchet.config.training",
    "ratchet.config.workers",
    "ratchet.pipeline.dag",
    "ratchet.errors",
    "ratchet.pipeline.plan",
    "ratchet.store",
    "tasks.runtime.context",
    "tasks.runtime.manifests",
    "tasks.runtime.worker",
)


def _is_by_value(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in BY_VALUE)


def _source_file(module: str) -> Path | None:
    """File of a module of ours; None for a name that is no module (an imported function).

    Found by path: asking the import system would import parent modules, torch and all.
    """
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
def code_version(module: str) -> str:
    """Version of the code behind `module`, 16 hexadecimal digits."""
    hashes: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in hashes or _is_by_value(name):
            continue
        parts = _module_parts(name)
        if parts is None:
            continue
        hashes[name], imports = parts
        todo.extend(imports)
    return text_hash(canonical_json(hashes))[:16]
