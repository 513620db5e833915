"""The command line: what it prints, how it exits, and that the README knows every command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ratchet as ratchet_package
from flows.cli.app import app, main
from ratchet.store.store import Store
from tests.conftest import REPO
from tests.ratchet.store.test_store import make, manifest

RATCHET = Path(sys.executable).with_name("ratchet")
runner = CliRunner()


def ratchet(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RATCHET, *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def commands() -> list[str]:
    """Every command, as `ratchet --help` lists them."""
    text = runner.invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    listing = text[text.index("Commands") :]
    return re.findall(r"^[│ ]\s{1,2}(\w[\w-]*)\s{2,}", listing, flags=re.MULTILINE)


def test_every_command_has_help_and_stands_in_the_readme() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    names = commands()
    assert {"run", "stage", "plan", "runs", "show", "lineage", "verify", "rewards"} <= set(names)
    for name in names:
        assert f"ratchet {name}" in readme, f"README says nothing of `ratchet {name}`"
        help_text = runner.invoke(app, [name, "--help"])
        assert help_text.exit_code == 0, name


def test_options_in_the_readme_exist() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"`?ratchet ([a-z]+ [^`\n|#]*)", readme):
        words = line.split()
        help_text = runner.invoke(app, [words[0], "--help"], env={"COLUMNS": "200"}).stdout
        for option in re.findall(r"--[a-z-]+", line):
            assert option in help_text, f"{option} of `ratchet {line}`"


def test_the_version_stands_in_one_place() -> None:
    assert runner.invoke(app, ["--version"]).stdout == f"{ratchet_package.__version__}\n"


def notok(folder: Path) -> Path:
    """A model folder without a tokenizer."""
    model = folder / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REPO / "data" / "seedling" / name, model / name)
    return model


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    notok(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cases.jsonl").write_text('{"id": 1, "gold": "2", "completion": "2"}')
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": 1, "gold": "2", "completion": "caf\xe9"}')
    file_source = "questions.train.0.kind=file"
    cases: list[tuple[list[str], str]] = [
        (["run", "--preset", "demoo"], "no preset 'demoo'; did you mean 'demo'?"),
        (["run", "--preset", "demo", "--set", "filter.kep_below=1"], "did you mean 'keep_below'?"),
        (
            ["run", "-p", "demo", "-s", file_source, "-s", "questions.train.0.path=no.jsonl"],
            f"{tmp_path}/no.jsonl",
        ),
        (["run", "--preset", "demo", "--set", "model.path=model"], "has no tokenizer"),
        (["run", "--preset", "demo", "--set", "model.path=empty"], "has no config.json"),
        (["run", "--preset", "demo", "--set", "model.path="], "at least 1 character"),
        (["run", "--preset", "demo", "--set", "model.path=latin.toml"], "latin.toml is a file"),
        (
            ["plan", "-p", "demo", "-s", "warmstart.method=opd", "-s", "opd.teacher=/no/teacher"],
            "opd.teacher: no folder /no/teacher",
        ),
        (
            ["plan", "--preset", "demo", "--set", "rollouts.path=/no/such"],
            "there is no file or folder /no/such",
        ),
        (["verify", "--in", "cases.jsonl", "--out", "empty"], "empty is a folder"),
        (["verify", "--in", "latin.jsonl", "--out", "out.jsonl"], "latin.jsonl is not UTF-8"),
        (["plan", "-p", "latin.toml"], "latin.toml is not UTF-8"),
        (["run"], "--preset demo"),
        (["run", "-p", "demo", "-s", "sampler.max_completion_tokens=5000"], "the model's context"),
        (["stage", "filter"], "no runs"),
        (["show", "latest"], "no store"),
        (["run", "--preset", "demo", "--data", "nowhere"], "nowhere is no folder"),
        (["verify"], "--in and --out"),
    ]
    for arguments, words in cases:
        done = ratchet(*arguments, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stdout == "", arguments
        assert words in done.stderr, arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "artifacts").exists()


def test_show_and_lineage_of_an_artifact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    parent = make(store, "score", "aaaa", "one")
    make(store, "filter", "bbbb", "two", {"scores": parent.as_parent()})

    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ratchet", *arguments, "--store", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert "filter/bbbb" in printed("show", "bbb")
    assert json.loads(printed("show", "bbb", "--json"))["parents"]["scores"]["key"] == "aaaa"
    tree = json.loads(printed("lineage", "filter/bbbb", "--json"))
    assert [(item["role"], item["key"]) for item in tree["parents"]] == [("scores", "aaaa")]
    drawn = printed("lineage", "bbbb").splitlines()
    assert drawn[0].startswith("filter bbbb")
    assert "score aaaa" in drawn[1]


def test_show_writes_nested_figures_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = {
        "num_questions": 1234,
        "resumed": False,
        "formats": {
            "tags": {"strict": 0.51234, "places": {"boxed": 1.0}},
            "hash": {"strict": 1 / 3, "places": {}},
        },
        "bounds": [0.1, 0.9],
        "variants": [{"variant": "rl"}, {"variant": "baseline"}],
        "words": ["First line.", "Second line."],
    }
    store = Store(tmp_path)
    with store.lock("benchmark", "cccc", print), store.build("benchmark", "cccc") as build:
        made = manifest("benchmark", "cccc", None).model_copy(update={"summary": summary})
        store.commit(build, made)
    monkeypatch.setattr(sys, "argv", ["ratchet", "show", "cccc", "--store", str(tmp_path)])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main()
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()[2:]] == [
        "num_questions  1,234",
        "resumed        no",
        "formats",
        "  tags         strict: 0.5123",
        "    places     boxed: 1",
        "  hash         strict: 0.3333",
        "    places     none",
        "bounds         0.1, 0.9",
        "variants       2 entries, which --json shows",
        "words          First line.",
        "               Second line.",
    ]


def test_plan_shows_every_setting_as_it_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "demo"\n[grpo]\nsteps = 7\n')
    done = ratchet("plan", "-p", "mine.toml", "--settings", "-s", "seed=3", cwd=tmp_path)
    lines = done.stdout.splitlines()
    told = dict(line.split(" = ", 1) for line in lines)
    assert (told["seed"], told["grpo.steps"], told["grpo.learning_rate"]) == ("3", "7", "0.001")
    assert told["questions.train.0.kind"] == '"symbolic"'
    assert told["grpo.lora.r"] == "16"  # nobody set it
    assert len(told) == len(lines) > 100


def test_plan_says_what_a_setting_would_change(tmp_path: Path) -> None:
    rows = json.loads(
        ratchet("plan", "--preset", "demo", "--store", str(tmp_path), "--json", cwd=tmp_path).stdout
    )
    assert [row["state"] for row in rows] == ["run"] * len(rows)
    other = json.loads(
        ratchet(
            "plan", "-p", "demo", "-s", "filter.keep_below=0.9", "--store", str(tmp_path), "--json",
            cwd=tmp_path,
        ).stdout
    )  # fmt: skip
    changed = [a["node"] for a, b in zip(rows, other, strict=True) if a["key"] != b["key"]]
    assert [name for name in changed if name != "audit"] == [  # without vLLM there is none
        "filter", "warmstart", "grpo", "evaluate.warmstart", "evaluate.rl", "compare", "report",
    ]  # fmt: skip
