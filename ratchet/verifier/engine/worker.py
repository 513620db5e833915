"""A worker process: one comparison at a time, as plain tuples over a pipe to its parent only.

The worker caps its memory, arms a kernel timer that kills it should it overrun (even when the
parent is gone and the interpreter is stuck in one long operation), and leaves when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection

GRACE_SECONDS = 1.0
PARENT_POLL_SECONDS = 2.0
WARM_UP = ("f(x)+\\sum_{k=1}^{n} k", "f(y)+\\sum_{k=1}^{n} k")


def compare(gold: str, answer: str) -> tuple[str, bool, str]:
    """(status, right, reason) of one comparison of cleaned answers."""
    from ratchet.verifier.answers.structure import Comparison
    from ratchet.verifier.engine.symbolic import EngineScalars, RefusedError, UnreadableError

    try:
        right = Comparison(EngineScalars()).equal(gold, answer)
    except RefusedError as refused:
        return "too_complex", False, str(refused)
    except UnreadableError as unreadable:
        return "parse_failure", False, f"the engine cannot read {unreadable.text[:80]!r}"
    except (MemoryError, RecursionError) as error:
        return "too_complex", False, f"{type(error).__name__} in the engine"
    except Exception as error:  # the engine fails in any way its libraries can
        return "parse_failure", False, f"the engine failed: {type(error).__name__}"
    return "ok", right, "equal in the engine" if right else "not equal in the engine"


def limit_memory(memory_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(descriptor: int, memory_bytes: int) -> None:
    """Serve until the pipe ends or the parent is gone."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory(memory_bytes)
    compare(*WARM_UP)  # imports and the grammar's first use take longer than most tasks
    with contextlib.suppress(EOFError, OSError), Connection(descriptor) as pipe:
        pipe.send("ready")
        while os.getppid() == parent:
            if not pipe.poll(PARENT_POLL_SECONDS):
                continue
            gold, answer, deadline_seconds = pipe.recv()
            signal.setitimer(signal.ITIMER_REAL, deadline_seconds + GRACE_SECONDS)
            reply = compare(gold, answer)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(reply)
