"""The wheel, installed outside the clone: what it holds, and that it runs the pipeline.

The dependencies are those of the environment that the tests run in; only our own packages come from
the wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from ratchet import __version__
from ratchet.config.presets import preset_names
from tests.conftest import REPO

pytestmark = pytest.mark.slow

SMALL = (
    'questions.train=[{kind="symbolic", count=16, seed=1}]',
    'questions.dev=[{kind="symbolic", count=4, seed=2}]',
    'questions.test=[{kind="symbolic", count=8, seed=3}]',
    "benchmark.limit=4",
    "benchmark.formats=[]",
    "presample.k=4",
    "presample.k_block=4",
    "sampler.engine=transformers",
    "sampler.max_completion_tokens=24",
    "sft.epochs=1",
    "sft.checkpoints=1",
    "grpo.steps=2",
    "grpo.group_size=4",
    "grpo.prompts_per_step=2",
    "grpo.micro_batch_size=8",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("ratchet", "tasks", "flows", "data"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel and sees this one's dependencies."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    # An added folder's own .pth files aren't read, so an editable install there doesn't count.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def outside(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of the clone on its path; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    kept.pop("PYTHONPATH", None)
    kept.pop("RATCHET_STORE", None)
    kept |= {"PREFECT_HOME": str(cwd / "prefect"), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_holds_every_file_that_is_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.getinfo(name).file_size for name in archive.namelist()}
    files = [path for path in (REPO / "data").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert held[f"ratchet/data/{path.relative_to(REPO / 'data')}"] == path.stat().st_size
    for package in ("ratchet", "tasks", "flows"):
        for path in (REPO / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(REPO)) in held


def test_the_installed_wheel_answers_outside_the_clone(installed: Path, tmp_path: Path) -> None:
    code = "import ratchet, tasks, flows; print(ratchet.__file__, tasks.__file__, flows.__file__)"
    origins = outside([installed / "python", "-c", code], tmp_path).stdout.split()
    assert all(Path(origin).is_relative_to(installed.parent) for origin in origins), origins
    ratchet = installed / "ratchet"
    assert outside([ratchet, "--version"], tmp_path).stdout == f"{__version__}\n"
    listed = outside([ratchet, "presets"], tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == preset_names()
    for name in ("demo", "qwen3-0.6b-gsm8k"):  # the latter extends two others
        planned = outside([ratchet, "plan", "--preset", name, "--json"], tmp_path).stdout
        assert {row["state"] for row in json.loads(planned)} == {"run"}
    (tmp_path / "cases.jsonl").write_text('{"id": 1, "gold": "1/2", "completion": "0.5"}\n')
    files = ["--in", "cases.jsonl", "--out", "out.jsonl", "--style", "plain"]
    outside([ratchet, "verify", *files], tmp_path)
    assert json.loads((tmp_path / "out.jsonl").read_text())["lenient"] is True
    assert "symbolic" in outside([ratchet, "verify", "--self-test", "symbolic"], tmp_path).stdout
    assert not (tmp_path / "artifacts").exists()


def test_the_installed_wheel_runs_the_pipeline(installed: Path, tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    done = outside([installed / "ratchet", "run", "--preset", "demo", *settings], tmp_path)
    assert done.stdout.splitlines()[0] == f"store: {tmp_path / 'artifacts'}"
    (made,) = (tmp_path / "artifacts" / "runs").iterdir()
    record = json.loads((made / "run.json").read_text())
    assert record["status"] == "completed"
    assert {node["state"] for node in record["nodes"].values()} == {"done"}
    report = outside([installed / "ratchet", "report", "latest"], tmp_path).stdout.strip()
    assert Path(report).is_file()
