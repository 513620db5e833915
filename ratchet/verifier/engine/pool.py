"""Worker processes for symbolic checks, with deadlines that hold.

One dispatcher thread per process owns every worker: it hands out one task at a time, counts the
deadline from that moment, kills and replaces a worker that passes it or dies, and recycles workers
after many tasks. Any thread may call `run`; callers only wait on futures, so no signal, alarm or
handler of theirs is touched. Workers are fresh interpreters (never forks of a process that may
hold torch or threads), and are started only when the first task comes. A forked child starts
with no pool of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ratchet.places import ROOT
from ratchet.verifier.engine import worker as worker_module

START_SECONDS = 60.0
MEMORY_BYTES = 2 << 30
TASKS_PER_WORKER = 5_000
MAX_WORKERS = 8
MAX_START_FAILURES = 3
HEADER = struct.Struct("!I")

Reply = tuple[str, bool, str, float]  # status, right, reason, seconds since dispatch


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
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
            f"from {worker_module.__name__} import main; main({memory_bytes})"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.ready = False
        self.task: Task | None = None
        self.tasks_done = 0
        self.due = time.monotonic() + START_SECONDS
        self.buffer = b""

    def give(self, task: Task) -> None:
        """Send `task` and start its clock. BrokenPipeError if the worker is gone."""
        data = pickle.dumps((task.gold, task.answer, task.deadline_seconds))
        self.task = task
        task.dispatched = time.monotonic()
        self.due = task.dispatched + task.deadline_seconds
        self.stdin.write(HEADER.pack(len(data)) + data)
        self.stdin.flush()

    def read(self) -> tuple[bool, object | None]:
        """(still alive, a complete message or None)."""
        try:
            part = os.read(self.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True, None
        self.buffer += part
        message = None
        if len(self.buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self.buffer)
            if len(self.buffer) >= HEADER.size + length:
                message = pickle.loads(self.buffer[HEADER.size : HEADER.size + length])
                self.buffer = self.buffer[HEADER.size + length :]
        return bool(part), message

    def kill(self) -> None:
        """End the process now and reap it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()


class Pool:
    """Runs comparisons in worker processes; see the module's docstring."""

    def __init__(self, size: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self.size = size or max(2, min(os.cpu_count() or 1, MAX_WORKERS))
        self.memory_bytes = memory_bytes
        self.lock = threading.Lock()
        self.waiting: deque[Task] = deque()
        self.workers: list[Worker] = []
        self.thread: threading.Thread | None = None
        self.closed = False
        self.start_failures = 0
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def run(self, pairs: Sequence[tuple[str, str]], deadline_seconds: float) -> list[Reply]:
        """The reply to every (gold, answer) pair, in order. Each pair has its own deadline."""
        tasks = [Task(gold, answer, deadline_seconds) for gold, answer in pairs]
        with self.lock:
            if self.closed:
                return [("error", False, "the verifier was closed", 0.0)] * len(tasks)
            self.waiting.extend(tasks)
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self.dispatch, name="ratchet-verifier", daemon=True
                )
                self.thread.start()
        self.wake()
        return [task.future.result() for task in tasks]

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self.wake_write, b"x")

    def close(self) -> None:
        """Stop the dispatcher and end every worker. Tasks still waiting end as errors."""
        with self.lock:
            self.closed = True
            thread = self.thread
        self.wake()
        if thread is not None:
            thread.join(timeout=10)

    def dispatch(self) -> None:
        """The dispatcher thread: start, feed, watch and replace workers."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake_read, selectors.EVENT_READ)
            try:
                while not self.closed:
                    self.staff(selector)
                    self.feed(selector)
                    for key, _ in selector.select(self.seconds_to_next_due()):
                        if key.data is None:
                            with contextlib.suppress(BlockingIOError):
                                os.read(self.wake_read, 1 << 12)
                        else:
                            self.receive(selector, key.data)
                    self.enforce(selector)
            finally:
                self.end()

    def seconds_to_next_due(self) -> float | None:
        dues = [w.due for w in self.workers if w.task is not None or not w.ready]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def staff(self, selector: selectors.BaseSelector) -> None:
        """Start workers: one per waiting or running task, two at least, `size` at most."""
        with self.lock:
            wanted = len(self.waiting) + sum(w.task is not None for w in self.workers)
        while self.workers or wanted:
            if len(self.workers) >= min(self.size, max(2, wanted)):
                break
            worker = Worker(self.memory_bytes)
            self.workers.append(worker)
            selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def feed(self, selector: selectors.BaseSelector) -> None:
        """Give waiting tasks to idle workers."""
        for worker in list(self.workers):
            if not worker.ready or worker.task is not None:
                continue
            with self.lock:
                task = self.waiting.popleft() if self.waiting else None
            if task is None:
                return
            try:
                worker.give(task)
            except OSError:  # it died while idle: the task is untouched
                worker.task = None
                with self.lock:
                    self.waiting.appendleft(task)
                self.drop(selector, worker)

    def receive(self, selector: selectors.BaseSelector, worker: Worker) -> None:
        """Take what a worker sent; settle its task, or see that it died."""
        alive, message = worker.read()
        if message == "ready":
            worker.ready = True
            self.start_failures = 0
        elif message is not None and worker.task is not None:
            assert isinstance(message, tuple), "workers send (status, right, reason)"
            worker.task.settle(*message)
            worker.task = None
            worker.tasks_done += 1
        if not alive or (worker.task is None and worker.tasks_done >= TASKS_PER_WORKER):
            self.drop(selector, worker, "too_complex", "the worker ran out of memory or died")

    def enforce(self, selector: selectors.BaseSelector) -> None:
        """Kill every worker whose time is up."""
        now = time.monotonic()
        for worker in list(self.workers):
            if now < worker.due or (worker.ready and worker.task is None):
                continue
            self.drop(selector, worker, "timeout", "no verdict within the deadline")

    def drop(
        self,
        selector: selectors.BaseSelector,
        worker: Worker,
        status: str = "",
        reason: str = "",
    ) -> None:
        """Kill a worker, settle its task, and give up after repeated failures to start."""
        selector.unregister(worker.stdout)
        self.workers.remove(worker)
        if worker.task is not None and status:
            worker.task.settle(status, False, reason)
        worker.kill()
        if not worker.ready:
            self.start_failures += 1
            if self.start_failures >= MAX_START_FAILURES:
                self.fail_waiting("the verifier's worker process cannot start")
                self.start_failures = 0

    def fail_waiting(self, reason: str) -> None:
        with self.lock:
            tasks = list(self.waiting)
            self.waiting.clear()
        for task in tasks:
            task.settle("error", False, reason)

    def end(self) -> None:
        """Kill all workers and settle all tasks."""
        for worker in self.workers:
            if worker.task is not None:
                worker.task.settle("error", False, "the verifier was closed")
            worker.kill()
        self.workers.clear()
        with self.lock:
            self.closed = True
        self.fail_waiting("the verifier was closed")


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
