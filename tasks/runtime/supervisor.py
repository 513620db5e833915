"""A process that outlives nothing: it runs one command and ends with it all that it started.

`python -m tasks.runtime.supervisor COMMAND…` stands between a flow and a worker (or a private
Prefect server). It leads a session of its own, so Ctrl-C in the terminal doesn't reach the worker
behind the flow's back, and it holds a pipe from the flow on standard input. When the pipe closes,
because the flow closed it or died in whatever way, or on SIGTERM, it ends its whole process group
and every other descendant: SIGTERM first, SIGKILL after `GRACE_SECONDS`. What a finished command
leaves behind is ended too, so that no device memory stays taken.

On Linux the supervisor adopts orphans (`PR_SET_CHILD_SUBREAPER`), which finds processes that left
the group as well: torchrun and Ray start theirs in sessions of their own. And should the supervisor
itself be killed, its command gets SIGKILL from the kernel (`PR_SET_PDEATHSIG`). Elsewhere the group
is all there is. Only the standard library is imported: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from ratchet.places import ROOT

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
SIGNAL_EXIT = 128
"""Exit status of a command ended by signal n is this plus n, as in a shell."""

START_FOLDER = ROOT
"""Processes start here: `-m` puts the working directory on the import path, and a user's own
folder named `tasks` must not come before ours."""


class Supervised:
    """A command under a supervisor, seen from the process that wants it; a context manager that
    leaves nothing running. `environment` replaces this process's where it is given."""

    def __init__(
        self,
        command: list[str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.runtime.supervisor", *command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            cwd=START_FOLDER,
            env=environment,
        )

    @property
    def stdout(self) -> IO[bytes]:
        """What the command prints; needs `stdout=subprocess.PIPE`."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def pid(self) -> int:
        """Id of the supervisor and of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status of the command, None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the command's end; its exit status (128 + n after signal n)."""
        code = self._process.wait()
        return code if code >= 0 else SIGNAL_EXIT - code

    def stop(self) -> None:
        """Ask for the end of it all; safe in a signal handler and more than once."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        try:
            left = self._process.wait(timeout=GRACE_SECONDS + 2) < 0
        except subprocess.TimeoutExpired:
            left = True
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
        if left:  # the supervisor was killed or hangs, its group is still there
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def by_signal(number: int) -> str:
    """How a process ended that signal `number` ended, in words."""
    return f"by signal {number}" + (" (out of memory?)" if number == signal.SIGKILL else "")


def free_port() -> int:
    """A loopback port that nobody listens on, for a server that is about to be started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, value, 0, 0, 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with_supervisor() -> None:
    """In the command's process before it becomes the command: a killed supervisor can't end it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """End this process when the thread that started it does, in process `parent` (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died meanwhile
        os._exit(SIGNAL_EXIT + signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Parent by process id, of all living processes that may be looked at (Linux)."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """All living descendants of a process; an empty list where there is no /proc."""
    if sys.platform != "linux":
        return []
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _reap() -> None:
    """Collect what has ended, adopted orphans included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _end_everything(worker_has_ended: Callable[[], bool]) -> None:
    """SIGTERM to group and descendants, SIGKILL to what is left after the grace."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are a member of the group
    os.killpg(0, signal.SIGTERM)
    asked: set[int] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        left = descendants(os.getpid())
        if worker_has_ended():
            _reap()
            if not left:
                return
        _send(signal.SIGTERM, set(left) - asked)  # each once; some were forked just now
        asked.update(left)
        time.sleep(POLL_SECONDS)
    while left := descendants(os.getpid()):  # again and again: they may fork meanwhile
        _send(signal.SIGKILL, left)
        time.sleep(POLL_SECONDS)
        if worker_has_ended():
            _reap()


def main(command: list[str]) -> int:
    """Run `command` until it ends or nobody wants it any more."""
    wake = threading.Event()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: wake.set())
    _adopt_orphans()
    worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_supervisor)

    def watch_worker() -> None:
        ended.append(worker.wait())
        wake.set()

    def watch_parent() -> None:
        while os.read(0, 4096):
            pass
        wake.set()

    for watch in (watch_worker, watch_parent):
        threading.Thread(target=watch, daemon=True).start()
    wake.wait()
    _end_everything(lambda: bool(ended))
    code = ended[0] if ended else -signal.SIGKILL
    return code if code >= 0 else SIGNAL_EXIT - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
