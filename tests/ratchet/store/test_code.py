"""What counts as a stage's code: a change of it makes the stage's results anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.pipeline.stages import STAGES
from ratchet.store import code
from tests.conftest import REPO

SAMPLES = {
    "ratchet.models", "ratchet.prompts", "ratchet.store", "ratchet.verifier", "tasks.models",
    "tasks.sampling", "tasks.stages",
}  # fmt: skip
TRAINS = SAMPLES - {"ratchet.store"} | {"ratchet.rewards", "tasks.sync", "tasks.training"}
STORED = {
    "model": {"ratchet.models", "tasks.models", "tasks.stages"},
    "questions": {
        "ratchet.models", "ratchet.prompts", "ratchet.questions", "ratchet.verifier",
        "tasks.models", "tasks.stages",
    },
    "decontaminate": {"ratchet.questions", "ratchet.store", "tasks.stages"},
    "benchmark": SAMPLES | {"ratchet.diagnostics", "ratchet.evaluation"},
    "presample": SAMPLES | {"ratchet.questions"},
    "filter": {"ratchet.selection", "ratchet.store", "tasks.stages"},
    "headroom": {"tasks.stages"},
    "evaluate": SAMPLES | {"ratchet.evaluation"},
    "compare": {"ratchet.evaluation", "tasks.stages"},
}  # fmt: skip
"""Folders whose modules count, by stage. A module that moves into another one shows here."""
AMONG_OTHERS = {
    "score": {"ratchet.prompts", "ratchet.rewards", "ratchet.store", "ratchet.verifier"},
    "rollouts": {"ratchet.questions", "ratchet.rollouts", "ratchet.store", "ratchet.verifier"},
    "warmstart_sft": TRAINS | {"tasks.warmstart"},
    "warmstart_opd": TRAINS | {"tasks.warmstart"},
    "audit": TRAINS | {"ratchet.store", "tasks.audit", "tasks.grpo"},
    "grpo": TRAINS | {"ratchet.diagnostics", "ratchet.rollouts", "ratchet.store", "tasks.grpo"},
    "report": {"ratchet.evaluation", "ratchet.report"},
}
"""The same, where more counts than is told here."""


def folders(stage: str) -> set[str]:
    """Folders of what counts for a stage, below a top package; its own modules are left out."""
    names = {".".join(name.split(".")[:2]) for name in code.covered(STAGES[stage].module)}
    return {name for name in names if (REPO / name.replace(".", "/")).is_dir()}


def test_what_is_left_out_by_name_is_there() -> None:
    for name in (*code.BY_VALUE, *code.COUNTED):
        assert code._source_file(name) is not None, name
    assert all(code._is_by_value(name.rpartition(".")[0]) for name in code.COUNTED)


@pytest.mark.parametrize("stage", list(STAGES))
def test_what_counts_is_all_that_a_stage_imports_but_what_reaches_it_by_value(stage: str) -> None:
    found = code.covered(STAGES[stage].module)
    assert STAGES[stage].module in found
    for name in found:
        assert not name.startswith("flows") and not code._is_by_value(name)
        parts = code._module_parts(name)
        assert parts is not None
        for imported in parts[1] - found.keys():
            left_out = code._is_by_value(imported) or imported in code.OURS
            assert left_out or code._source_file(imported) is None, (name, imported)


@pytest.mark.parametrize("stage", list(STAGES))
def test_what_counts_lies_where_it_did(stage: str) -> None:
    if stage in STORED:
        assert folders(stage) == STORED[stage]
    else:
        assert folders(stage) >= AMONG_OTHERS.get(stage, {"tasks.stages"})


def test_a_missing_module_is_told() -> None:
    with pytest.raises(AssertionError, match=r"no module tasks\.stages\.none"):
        code.code_version("tasks.stages.none")


def test_code_version_covers_what_a_stage_imports_and_ignores_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "ROOT", tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "ratchet").mkdir()
    stage, library = tmp_path / "tasks" / "a.py", tmp_path / "ratchet" / "b.py"
    stage.write_text("def run():\n    from ratchet.b import f\n    return f()\n")
    library.write_text("def f():\n    return 1\n")

    def version() -> str:
        code.covered.cache_clear()
        code._module_parts.cache_clear()
        return code.code_version("tasks.a")

    first = version()
    library.write_text('"""Words."""\n\ndef f():  # more words\n    """Docs."""\n    return 1\n')
    assert version() == first
    library.write_text("def f():\n    return 2\n")
    assert version() != first
    code.covered.cache_clear()
    code._module_parts.cache_clear()


def test_code_version_of_the_verifier_covers_its_worker_process() -> None:
    parts = code._module_parts("ratchet.verifier.engine.pool")
    assert parts is not None
    assert "ratchet.verifier.engine.worker" in parts[1]  # the pool starts it by name
