"""A lock per artifact, so that two processes asking for one key do the work once.

The lock is the kernel's (`flock` on a file in the store), so it goes with its owner, kill -9
included. The file also names the owner and its heartbeat, for the person who waits and for the
one case the kernel can't see: a forked child that outlives its dead parent and still holds the
descriptor. Such a lock is taken over once the owner is dead and its heartbeat is old.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
POLL_SECONDS = 0.2


def _describe_owner() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()


def _process_is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_owner(path: Path) -> dict[str, str | int] | None:
    """Who holds the lock at `path` as its file tells; None if it tells nothing (yet)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return json.loads(text) if text else None


def _owner_is_gone(path: Path) -> bool:
    """Whether the owner named in the file died on this host some time ago."""
    owner = read_owner(path)
    if owner is None or owner["host"] != socket.gethostname():
        return False
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    return age > STALE_SECONDS and not _process_is_alive(int(owner["pid"]))


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None while somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    try:
        current = path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        current = False
    if not current:  # the file was replaced between open and flock
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _describe_owner(), 0)
    return descriptor


def _take_over(path: Path) -> None:
    """Remove the file of a dead owner; one process at a time may do so."""
    guard = os.open(path.with_suffix(".takeover"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if _owner_is_gone(path):
            path.unlink(missing_ok=True)
    finally:
        os.close(guard)


def is_held(path: Path) -> bool:
    """Whether somebody alive holds the lock at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return not _owner_is_gone(path)
    finally:
        os.close(descriptor)
    return False


@contextmanager
def hold(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`; `on_wait` is told once who holds it, should somebody do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while (descriptor := _try_lock(path)) is None:
        if not told:
            owner = read_owner(path) or {}
            on_wait(f"waiting for process {owner.get('pid', '?')} on {owner.get('host', '?')}")
            told = True
        if _owner_is_gone(path):
            _take_over(path)
        time.sleep(POLL_SECONDS)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT_SECONDS):
            os.utime(descriptor)

    thread = threading.Thread(target=beat, name="lock heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        # The file stays: removing it would let a waiter lock a name that is gone.
        os.close(descriptor)
