"""GRPO in several processes of this machine, started through `accelerate launch`.

Every process (`tasks.grpo.process`) has a full copy of the policy and of the sampler and takes its
share of every step's questions, whole groups of them; gradients are averaged (PyTorch's DDP). On
GPUs each has a device of its own, and NCCL between them; on CPUs they share the cores, and gloo.
The stage's own process loads no model: it starts the others, passes on what the first of them
says, and ends them all when one has died.

They get context and settings in a file, and leave what came out, or what went wrong, in files
beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from ratchet.errors import UserError
from ratchet.store.store import write_durably
from tasks.grpo import process
from tasks.grpo.process import EVENTS, FAILURE, RESULT, TASK, Failure, Task
from tasks.grpo.settings import Sections
from tasks.runtime.context import StageContext, StageResult
from tasks.runtime.launch import EventFile
from tasks.runtime.supervisor import Supervised, by_signal

POLL_SECONDS = 0.2
TAIL_LINES = 60
"""Newest lines of the launcher that are searched for which process failed first."""
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def train_in_processes(ctx: StageContext, sections: Sections) -> StageResult:
    """Train in `grpo.processes` processes; UserError as training in one, RuntimeError saying which
    process failed."""
    folder = ctx.work_dir / "processes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_durably(folder / TASK, Task.of(ctx, sections).model_dump_json(indent=2))
    count = sections.grpo.processes
    ctx.log(f"training in {count} processes")
    with Supervised(
        launch_command(count, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        environment=_environment(),
    ) as launched:
        tail = _Tail(launched.stdout)
        events = EventFile(folder / EVENTS)
        while launched.poll() is None:
            time.sleep(POLL_SECONDS)
            for event in events.new():
                ctx.emit(event)
        code = launched.wait()
        tail.join()
    for event in events.new():
        ctx.emit(event)
    if code != 0:
        raise failure(folder, count, tail.text())
    return StageResult(**json.loads((folder / RESULT).read_text(encoding="utf-8")))


def launch_command(count: int, folder: Path) -> list[str]:
    """The command line that starts `count` processes, each with its part of the cores."""
    settings = {
        "num_processes": count,
        "num_machines": 1,
        "main_process_port": 0,  # unused, but looked for
        "rdzv_backend": "c10d",
        "rdzv_conf": "store_type=file",
        "mixed_precision": "no",  # the trainer's arguments say
        "dynamo_backend": "no",
        "num_cpu_threads_per_process": max(1, (os.cpu_count() or 1) // count),
    }
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    return [*command, "--module", process.__name__, str(folder)]


def _environment() -> dict[str, str]:
    """This process's, with its import path (a user's rewards) and everything on loopback."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # it would listen on every interface
    }


class _Tail:
    """Passes what the launcher and its processes print on to this process's own errors, which is
    the stage's log, and keeps the end of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)
        self.stream = stream
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self.stream:
            text = line.decode("utf-8", errors="replace")
            self.lines.append(text)
            sys.stderr.write(text)

    def join(self) -> None:
        """Wait until everything is read."""
        self.thread.join(timeout=10)

    def text(self) -> str:
        """The end of what was printed."""
        return "".join(self.lines)


def failure(folder: Path, count: int, said: str) -> UserError | RuntimeError:
    """What ended the processes: a user's mistake before all else, then a process that was killed
    (the others lose their connection to it), then the first that broke."""
    told = [Failure.read(file) for file in folder.glob(FAILURE.format("*"))]
    mistakes = sorted((one for one in told if one.is_users), key=lambda one: one.rank)
    if mistakes:
        return UserError(mistakes[0].message)
    found = ROOT_CAUSE.search(said)
    if found and int(found[2]) < 0 and int(found[1]) not in {one.rank for one in told}:
        what = f"training process {found[1]} of {count} was ended {by_signal(-int(found[2]))}"
        return RuntimeError(f"{what}, the others with it")
    if told:
        first = min(told, key=lambda one: one.time)
        return RuntimeError(f"training process {first.rank} of {count} failed: {first.message}")
    return RuntimeError(f"the {count} training processes ended before they were done")
