"""Worker processes for symbolic checks, with deadlines that hold.

Every worker has a thread of this process: it starts the worker, hands it one task at a time, counts
the deadline from that moment, kills and replaces a worker that passes it or dies, and recycles it
after many tasks. Only a thread whose worker is ready takes a task. Any thread may call `run`;
callers only wait on futures, so no signal, alarm or handler of theirs is touched. Workers are fresh
interpreters (never forks of a process that may hold torch or threads, and never running the
caller's main module, as those of `multiprocessing` do), and are started only when the first task
comes. A forked child starts with no pool of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from queue import Empty, SimpleQueue
from typing import Any

from ratchet.places import ROOT
from ratchet.verifier.engine import worker as worker_module

START_SECONDS = 60.0
MEMORY_BYTES = 2 << 30
TASKS_PER_WORKER = 5_000
MAX_WORKERS = 8
MAX_START_FAILURES = 3

Reply = tuple[str, bool, str, float]  # status, right, reason, seconds since dispatch

LATE = ("timeout", False, "no verdict within the deadline")
DIED = ("too_complex", False, "the worker ran out of memory or died")
NO_START = ("error", False, "the verifier's worker process cannot start")
CLOSED = ("error", False, "the verifier was closed")


@dataclass
class Task:
    """One comparison and the future its caller waits on."""

    gold: str
    answer: str
    deadline_seconds: float
    future: Future[Reply] = field(default_factory=Future)
    dispatched: float | None = None

    def settle(self, status: str, right: bool, reason: str) -> None:
        """Give the caller the reply."""
        seconds = 0.0 if self.dispatched is None else time.monotonic() - self.dispatched
        self.future.set_result((status, right, reason, seconds))


class Worker:
    """The parent's side of one worker process."""

    def __init__(self, memory_bytes: int) -> None:
        self.connection, theirs = Pipe()
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
            f"from {worker_module.__name__} import main; main({theirs.fileno()}, {memory_bytes})"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries print
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        """Send `task` and start its clock. OSError if the worker is gone."""
        self.task = task
        task.dispatched = time.monotonic()
        self.connection.send((task.gold, task.answer, task.deadline_seconds))

    def message(self, seconds: float) -> Any | None:
        """What the worker sends within `seconds`, None if nothing. EOFError if it is gone."""
        try:
            return self.connection.recv() if self.connection.poll(seconds) else None
        except OSError as error:
            raise EOFError from error

    def kill(self) -> None:
        """End the process now and reap it."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """Runs comparisons in worker processes; see the module's docstring."""

    def __init__(self, size: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self.size = size or max(2, min(os.cpu_count() or 1, MAX_WORKERS))
        self.memory_bytes = memory_bytes
        self.lock = threading.Lock()
        self.waiting: SimpleQueue[Task | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.workers: list[Worker] = []
        self.closed = False

    def run(self, pairs: Sequence[tuple[str, str]], deadline_seconds: float) -> list[Reply]:
        """The reply to every (gold, answer) pair, in order. Each pair has its own deadline."""
        tasks = [Task(gold, answer, deadline_seconds) for gold, answer in pairs]
        with self.lock:
            if self.closed:
                return [(*CLOSED, 0.0)] * len(tasks)
            for task in tasks:
                self.waiting.put(task)
            wanted = self.waiting.qsize() + sum(w.task is not None for w in self.workers)
            while wanted and len(self.threads) < min(self.size, max(2, wanted)):
                thread = threading.Thread(target=self.serve, name="ratchet-verifier", daemon=True)
                self.threads.append(thread)
                thread.start()
        return [task.future.result() for task in tasks]

    def close(self) -> None:
        """End every worker and its thread. Tasks still waiting end as errors."""
        with self.lock:
            self.closed = True
            self.settle_waiting(CLOSED)
            threads = list(self.threads)
            for worker in self.workers:
                worker.process.kill()
            for _ in threads:
                self.waiting.put(None)
        for thread in threads:
            thread.join(timeout=10)

    def serve(self) -> None:
        """A thread: start a worker, feed it, replace it. It gives up after repeated failures to
        start one; when the last thread does, the tasks that wait end as errors."""
        failures = 0
        while not self.closed and failures < MAX_START_FAILURES:
            worker = self.started()
            if worker is None:
                failures += 1
            else:
                failures = 0
                self.feed(worker)
        with self.lock:
            self.threads.remove(threading.current_thread())
            if not self.threads:
                self.settle_waiting(CLOSED if self.closed else NO_START)

    def started(self) -> Worker | None:
        """A new worker, ready for tasks; None if it cannot start."""
        try:
            with self.lock:
                if self.closed:
                    return None
                worker = Worker(self.memory_bytes)
                self.workers.append(worker)
            if worker.message(START_SECONDS) == "ready":
                return worker
        except EOFError:  # it left before it was ready
            pass
        except OSError:  # no process could be made
            return None
        self.dismiss(worker)
        return None

    def feed(self, worker: Worker) -> None:
        """Give a worker one task after another until it passes a deadline, dies or has had enough;
        then dismiss it."""
        for _ in range(TASKS_PER_WORKER):
            task = self.waiting.get()
            if task is None:
                break
            try:
                worker.give(task)
            except OSError:  # it died while idle: the task is untouched
                self.waiting.put(task)
                break
            try:
                reply = worker.message(task.deadline_seconds)
                failure = LATE
            except EOFError:
                reply, failure = None, CLOSED if self.closed else DIED
            if reply is None:
                self.dismiss(worker)
                task.settle(*failure)
                return
            worker.task = None
            task.settle(*reply)
        self.dismiss(worker)

    def dismiss(self, worker: Worker) -> None:
        with self.lock:
            self.workers.remove(worker)
        worker.kill()

    def settle_waiting(self, reply: tuple[str, bool, str]) -> None:
        """Give every waiting task the same reply. Call under the lock."""
        with contextlib.suppress(Empty):
            while True:
                task = self.waiting.get_nowait()
                if task is not None:
                    task.settle(*reply)


SHARED_LOCK = threading.Lock()
SHARED: list[Pool] = []  # the pool of this process, once there is one


def shared_pool() -> Pool:
    """The pool of this process, made on first use and closed at exit."""
    with SHARED_LOCK:
        if not SHARED or SHARED[0].closed:
            SHARED[:] = [Pool()]
        return SHARED[0]


def close_shared_pool() -> None:
    """End the worker processes, if any. The next check starts new ones."""
    with SHARED_LOCK:
        pools = list(SHARED)
        SHARED.clear()
    for pool in pools:
        pool.close()


def forget_after_fork() -> None:
    """In a forked child: the workers are the parent's, so start afresh when needed."""
    global SHARED_LOCK
    SHARED_LOCK = threading.Lock()
    SHARED.clear()


atexit.register(close_shared_pool)
os.register_at_fork(after_in_child=forget_after_fork)
