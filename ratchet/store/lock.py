"""A lock per artifact, so that two processes asking for one key do the work once.

The lock is the kernel's (`flock` on a file in the store, by way of filelock), so it goes with its
owner, kill -9 included; over NFS 4 and newer it holds between hosts. A child that the owner forks
doesn't inherit it. The file names the owner, for the person who waits; it stays when the lock is
free, because removing it would let a waiter lock a name that is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.2


def _owner_in_words(path: Path) -> str:
    """Who holds the lock, as its file tells; it may tell nothing yet."""
    text = path.read_text(encoding="utf-8")
    owner = json.loads(text) if text else {}
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def is_held(path: Path) -> bool:
    """Whether somebody alive holds the lock at `path`; only looks, and waits for nobody."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def hold(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`; `on_wait` is told once who holds it, should somebody do."""
    from filelock import FileLock, Timeout  # who only looks at the store needn't load it

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, poll_interval=POLL_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait(f"waiting for {_owner_in_words(path)}")
        lock.acquire()
    try:
        path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        yield
    finally:
        lock.release()
