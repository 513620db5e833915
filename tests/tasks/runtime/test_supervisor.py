"""Nothing stays behind, whoever dies in whatever way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tasks.runtime.supervisor import GRACE_SECONDS, ROOT, Supervised, descendants

# A worker with a child in its group and, as torchrun and Ray have them, one in its own session.
# $0 marks them all.
FAMILY = 'sh -c "sleep 600" "$0" & setsid sh -c "sleep 600; :" "$0" & echo ready; wait'
STUBBORN = "trap '' TERM; echo ready; while true; do sleep 0.1; done"


def alive(marker: str) -> list[str]:
    """Command lines of the living processes that carry `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


def wait_until_gone(marker: str, seconds: float) -> None:
    """Fails when a process with `marker` lives longer than that."""
    deadline = time.monotonic() + seconds
    while left := alive(marker):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.fixture
def marker() -> str:
    """A word that no other process carries."""
    return f"mark-{uuid.uuid4().hex}"


def started(script: str, marker: str) -> Supervised:
    """A supervised shell script that has said 'ready'."""
    worker = Supervised(
        ["sh", "-c", script, marker], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert worker.stdout.readline() == b"ready\n"
    return worker


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_code_is_the_commands(script: str, code: int) -> None:
    command = ["sh", "-c", script]
    with Supervised(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        assert worker.wait() == code


def test_leaving_the_block_ends_grandchildren_in_other_sessions(marker: str) -> None:
    with started(FAMILY, marker):
        assert len(alive(marker)) >= 3
    assert alive(marker) == []


def test_a_finished_command_leaves_nothing_behind(marker: str) -> None:
    with started(FAMILY.replace("wait", "exit 0"), marker) as worker:
        assert worker.wait() == 0
        assert alive(marker) == []


def test_killed_parent_takes_everything_along(marker: str) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys\n"
            "from tasks.runtime.supervisor import Supervised\n"
            "s = Supervised(['sh', '-c', *sys.argv[1:]], stdout=subprocess.PIPE, stderr=None)\n"
            "print(s.stdout.readline(), flush=True)\n"
            "s.wait()",
            FAMILY,
            marker,
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    assert len(alive(marker)) >= 4
    parent.kill()
    parent.wait()
    wait_until_gone(marker, 3.0)
    parent.stdout.close()


def test_killed_supervisor_takes_its_group_along(marker: str) -> None:
    with started("echo ready; sleep 600; :", marker) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.wait() == 137
    wait_until_gone(marker, 1.0)


def test_what_ignores_sigterm_is_killed_after_the_grace(marker: str) -> None:
    began = time.monotonic()
    with started(STUBBORN, marker):
        pass
    assert GRACE_SECONDS <= time.monotonic() - began < GRACE_SECONDS + 3
    assert alive(marker) == []


def test_sigterm_to_the_supervisor_ends_everything(marker: str) -> None:
    with started(FAMILY, marker) as worker:
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait()
        assert alive(marker) == []


def test_descendants_are_found_across_generations() -> None:
    shell = subprocess.Popen(["sh", "-c", "sh -c 'sleep 5; :'; :"])
    try:
        deadline = time.monotonic() + 5
        while len(descendants(shell.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(descendants(shell.pid)) == 2
    finally:
        for pid in [*descendants(shell.pid), shell.pid]:
            os.kill(pid, signal.SIGKILL)
        shell.wait()
