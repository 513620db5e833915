"""The worker pool: deadlines, memory, death, threads, forks, signals, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ratchet.verifier import Status, verify, verify_batch
from ratchet.verifier.engine.pool import Pool, shared_pool
from tests.conftest import REPO

# Past the pre-screen, and sums term by term: minutes of work for the engine.
SLOW = ("1", "+".join(f"\\sum_{{k=1}}^{{999}} \\frac{{x^k}}{{k^{n}+f(k)}}" for n in range(2, 9)))
EASY = ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}")
WRONG = ("\\sqrt{2}", "\\sqrt{3}")


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(size=2)
    made.run([EASY], 30)  # the workers are up
    yield made
    made.close()


def workers(pool: Pool) -> list[int]:
    return [worker.process.pid for worker in pool.workers]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_right_and_wrong(pool: Pool) -> None:
    replies = pool.run([EASY, WRONG, EASY], 30)
    assert [reply[:2] for reply in replies] == [("ok", True), ("ok", False), ("ok", True)]


def test_deadline_holds_and_the_worker_is_replaced(pool: Pool) -> None:
    before = set(workers(pool))
    start = time.monotonic()
    status, right, _, seconds = pool.run([SLOW], 0.5)[0]
    assert (status, right) == ("timeout", False)
    assert seconds < 1.0
    assert time.monotonic() - start < 1.0
    assert pool.run([EASY] * 4, 30)[0][:2] == ("ok", True)
    assert len(before & set(workers(pool))) == 1
    assert sum(alive(pid) for pid in before) == 1


def test_a_slow_check_does_not_hold_up_the_others(pool: Pool) -> None:
    replies = pool.run([SLOW, *[EASY] * 50], 2.0)
    assert [reply[0] for reply in replies] == ["timeout", *["ok"] * 50]


def test_a_worker_that_dies_is_too_complex(pool: Pool) -> None:
    victim: list[str] = []

    def run() -> None:
        victim.append(pool.run([SLOW], 20)[0][0])

    thread = threading.Thread(target=run)
    thread.start()
    busy: list[int] = []
    while not busy:
        busy = [worker.process.pid for worker in pool.workers if worker.task is not None]
        time.sleep(0.01)
    os.kill(busy[0], signal.SIGKILL)
    thread.join(10)
    assert victim == ["too_complex"]
    assert pool.run([EASY], 30)[0][:2] == ("ok", True)


def test_memory_is_capped() -> None:
    code = textwrap.dedent("""
        from ratchet.verifier.engine.worker import limit_memory
        limit_memory(256 << 20)
        try:
            bytes(300 << 20)
        except MemoryError:
            print("capped")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.stdout.strip() == "capped"


def test_workers_are_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.verifier.engine.pool.TASKS_PER_WORKER", 3)
    pool = Pool(size=2)
    try:
        pool.run([EASY], 30)
        before = set(workers(pool))
        assert {reply[0] for reply in pool.run([EASY] * 20, 30)} == {"ok"}
        assert not before & set(workers(pool))
    finally:
        pool.close()


def test_workers_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.verifier.engine.pool.ROOT", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = Pool(size=2)
    try:
        status, _, reason, _ = pool.run([EASY], 30)[0]
        assert status == "error"
        assert "cannot start" in reason
    finally:
        pool.close()


def test_same_verdicts_from_many_threads() -> None:
    cases = [
        (f"\\boxed{{\\sqrt{{{n}}}+{n}}}", f"{n}+\\sqrt{{{n}}}" if n % 2 else "1")
        for n in range(2, 42)
    ]

    def one(case: tuple[str, str]) -> bool:
        return verify(case[0], case[1], "boxed").lenient

    with ThreadPoolExecutor(8) as threads:
        from_threads = list(threads.map(one, cases))
    assert from_threads == [n % 2 == 1 for n in range(2, 42)]
    completions, golds = zip(*cases, strict=True)
    assert [v.lenient for v in verify_batch(completions, golds, "boxed")] == from_threads


def test_the_caller_s_alarm_and_handlers_stay() -> None:
    fired: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert verify("\\boxed{\\sqrt{12}}", "2\\sqrt{3}", "boxed").lenient
        time.sleep(0.5)
        assert fired == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def in_a_process(code: str) -> subprocess.Popen[str]:
    script = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", script, str(REPO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


START = """
    from ratchet.verifier import verify
    from ratchet.verifier.engine.pool import shared_pool
    assert verify("\\\\boxed{\\\\sqrt{12}}", "2\\\\sqrt{3}", "boxed").lenient
    print(*[worker.process.pid for worker in shared_pool().workers], flush=True)
"""


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("ending", ["normal", "killed"])
def test_no_orphans(ending: str) -> None:
    process = in_a_process(
        START + ("" if ending == "normal" else "    import time; time.sleep(60)")
    )
    pids = pids_of(process)
    assert pids
    if ending == "killed":
        process.kill()
    process.communicate(timeout=20)
    assert gone_within(pids, 10)


def test_no_orphan_while_a_worker_is_busy() -> None:
    process = in_a_process(
        START
        + f"""
    import threading
    from ratchet.verifier.engine.pool import shared_pool
    threading.Thread(target=shared_pool().run, args=([{SLOW!r}] * 2, 1.0), daemon=True).start()
    import time; time.sleep(0.3); print("busy", flush=True); time.sleep(60)
    """
    )
    pids = pids_of(process)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=20)
    assert gone_within(pids, 10)


def test_ctrl_c_reaches_the_caller_and_not_the_workers() -> None:
    process = in_a_process(
        START
        + f"""
    import signal
    # A test run in the background has Ctrl-C ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shared_pool().run([{SLOW!r}], 30)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    )
    pids = pids_of(process)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert "interrupted" in out, err
    assert gone_within(pids, 10)


def test_a_fork_has_workers_of_its_own() -> None:
    process = in_a_process(
        START
        + """
    import os
    child = os.fork()
    if child == 0:
        ok = verify("\\\\boxed{\\\\sqrt{18}}", "3\\\\sqrt{2}", "boxed").lenient
        os._exit(0 if ok else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(verify("\\\\boxed{\\\\sqrt{8}}", "2\\\\sqrt{2}", "boxed").lenient, flush=True)
    """
    )
    pids_of(process)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["0", "True"], err


def test_timeouts_are_not_remembered() -> None:
    completion = f"\\boxed{{{SLOW[1]}}}"
    first = verify(completion, "1+y", "boxed", deadline_seconds=0.3)
    start = time.monotonic()
    second = verify(completion, "1+y", "boxed", deadline_seconds=0.3)
    assert first.status is second.status is Status.TIMEOUT
    assert time.monotonic() - start >= 0.3
    assert shared_pool().size >= 2
