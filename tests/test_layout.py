"""The house rules that a machine can check: imports go one way, light modules stay light."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ratchet.pipeline.stage import Stage
from ratchet.pipeline.stages import STAGES
from ratchet.store.schemas import COLUMNS
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


def imports() -> dict[str, set[str]]:
    """Modules of ours that each of ours imports, lazily or for types only included."""
    files = {
        ".".join(file.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): file
        for package in PACKAGES
        for file in sources(package)
    }
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in files else node.module for name in inner}
        found[module] = names & files.keys() - {module}
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What can be reached from itself."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        return found

    return [name for name in graph if name in reached(name)]


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_no_modules_and_no_folders_import_in_a_circle() -> None:
    modules = imports()
    assert circles(modules) == []
    folders: dict[str, set[str]] = {}
    for module, names in modules.items():
        folder, *others = (".".join(name.split(".")[:2]) for name in (module, *names))
        folders.setdefault(folder, set()).update(set(others) - {folder})
    assert circles(folders) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_is_one_idea_of_few_modules(package: str) -> None:
    """`tasks/stages` has a file per stage, however many there are."""
    counted = Counter(file.parent for file in sources(package) if file.name != "__init__.py")
    counted.pop(REPO / "tasks" / "stages", None)
    assert max(counted.values()) <= 16, counted.most_common(1)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_prefix_is_a_folder_in_disguise(package: str) -> None:
    prefixes = Counter(
        (file.parent, file.stem.split("_")[0]) for file in sources(package) if "_" in file.stem
    )
    common = {place: count for place, count in prefixes.items() if count > 3 and place[1]}
    assert common == {}


def test_tests_stand_where_the_code_stands() -> None:
    tests = REPO / "tests"
    rooms = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    assert len(rooms) > 20
    assert [str(room) for room in sorted(rooms) if not (REPO / room).is_dir()] == []


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


def function_at(reference: str) -> ast.FunctionDef:
    """The function that a string `module:function` names, read from its source."""
    module, _, name = reference.partition(":")
    path = REPO.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_a_stage_sees_exactly_the_sections_that_enter_its_key(stage: Stage) -> None:
    arguments = function_at(stage.run).args.kwonlyargs
    assert [argument.arg for argument in arguments] == list(stage.sections)


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_what_a_stage_names_is_there(stage: Stage) -> None:
    for chart in stage.charts:
        assert function_at(chart)
    if isinstance(stage.table, str):
        assert stage.table in COLUMNS
    assert set(stage.unkeyed) <= set(stage.sections)
    assert stage.own_section is None or stage.own_section in stage.sections


def test_stage_modules_take_a_context_and_return_a_result() -> None:
    from tasks.runtime.context import StageContext, StageResult
    from tasks.stages import filter as filter_stage

    signature = inspect.signature(filter_stage.run, eval_str=True)
    assert next(iter(signature.parameters.values())).annotation is StageContext
    assert signature.return_annotation is StageResult
