"""The house rules that a machine can check: imports go one way, light modules stay light."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.pipeline.dag import STAGES
from ratchet.store.code import code_version
from tests.conftest import REPO

HEAVY = {"torch", "transformers", "trl", "vllm", "peft", "datasets", "prefect", "wandb"}
FORBIDDEN = {
    "ratchet": HEAVY | {"tasks", "flows"},
    "tasks": {"prefect", "flows"},
    "flows": set(),
}
PACKAGES = ("ratchet", "tasks", "flows")
LIGHT_STAGES = (
    "model", "questions", "decontaminate", "score", "rollouts", "filter", "headroom", "compare",
    "report",
)  # fmt: skip


def sources(package: str) -> list[Path]:
    return sorted((REPO / package).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def at_top(tree: ast.Module) -> set[str]:
    """Packages imported at module level, `if TYPE_CHECKING` left out."""
    return set().union(
        *(imported(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)),
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    layers = {name for name in FORBIDDEN[package] if name in PACKAGES}
    files = sources(package)
    assert files
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert not imported(tree) & layers, file
        assert not at_top(tree) & FORBIDDEN[package], file


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for_and_stays_readable(package: str) -> None:
    for file in sources(package):
        text = file.read_text(encoding="utf-8")
        assert file.name == "__init__.py" or ast.get_docstring(ast.parse(text)), file
        assert len(text.splitlines()) <= 450, file


@pytest.mark.parametrize("package", PACKAGES)
def test_our_packages_resolve_inside_the_project(package: str) -> None:
    """A dependency that ships a package of the same name must not win over ours."""
    command = f"import {package}; print({package}.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd="/"
    )
    assert Path(done.stdout.strip()).parent == REPO / package


def modules_after(command: str) -> set[str]:
    code = f"import sys\n{command}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_command_line_starts_without_anything_heavy() -> None:
    loaded = modules_after("import flows.cli.app")
    assert not loaded & (HEAVY | {"pandas", "pyarrow", "numpy", "scipy", "matplotlib", "sympy"})


def test_planning_needs_no_torch() -> None:
    loaded = modules_after(
        "from pathlib import Path\n"
        "from ratchet.config.load import load_config\n"
        "from ratchet.pipeline.plan import make_plan\n"
        "from ratchet.store.store import Store\n"
        "assert make_plan(load_config('demo'), Store(Path('none'))).nodes"
    )
    assert not loaded & HEAVY


@pytest.mark.parametrize("stage", LIGHT_STAGES)
def test_light_stages_load_no_torch(stage: str) -> None:
    assert "torch" not in modules_after(f"import {STAGES[stage].module}")


def declared_arguments(module: str) -> list[str]:
    """Keyword-only arguments of a stage module's `run`, read from its source."""
    path = REPO.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    runs = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    assert len(runs) == 1, module
    return [argument.arg for argument in runs[0].args.kwonlyargs]


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_sees_exactly_the_sections_that_enter_its_key(stage: str) -> None:
    assert declared_arguments(STAGES[stage].module) == list(STAGES[stage].sections)


def test_code_version_covers_what_a_stage_imports_and_ignores_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratchet.store import code

    monkeypatch.setattr(code, "ROOT", tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "ratchet").mkdir()
    stage, library = tmp_path / "tasks" / "a.py", tmp_path / "ratchet" / "b.py"
    stage.write_text("def run():\n    from ratchet.b import f\n    return f()\n")
    library.write_text("def f():\n    return 1\n")

    def version() -> str:
        code_version.cache_clear()
        code._module_parts.cache_clear()
        return code_version("tasks.a")

    first = version()
    library.write_text('"""Words."""\n\ndef f():  # more words\n    """Docs."""\n    return 1\n')
    assert version() == first
    library.write_text("def f():\n    return 2\n")
    assert version() != first
    code_version.cache_clear()
    code._module_parts.cache_clear()


def test_code_version_of_the_verifier_covers_its_worker_process() -> None:
    from ratchet.store import code

    parts = code._module_parts("ratchet.verifier.engine.pool")
    assert parts is not None
    assert "ratchet.verifier.engine.worker" in parts[1]  # the pool starts it by name


def test_stage_modules_take_a_context_and_return_a_result() -> None:
    from tasks.runtime.context import StageContext, StageResult
    from tasks.stages import filter as filter_stage

    signature = inspect.signature(filter_stage.run, eval_str=True)
    assert next(iter(signature.parameters.values())).annotation is StageContext
    assert signature.return_annotation is StageResult
