"""One of several training processes: `accelerate launch … -m tasks.grpo.process FOLDER`.

Reads its task in FOLDER, trains, and leaves there what came out (the first process) or what went
wrong (each). Only the first process speaks to the person who watches.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ratchet.config.run import WandbConfig
from ratchet.errors import EXIT_USER_ERROR, UserError, in_one_line
from ratchet.store.manifest import Record
from ratchet.store.store import Artifact, Store, write_durably
from tasks.grpo.finish import finish
from tasks.grpo.settings import Sections
from tasks.grpo.train import prepare, train
from tasks.runtime.context import StageContext

TASK = "task.json"
MEETING = "meeting"
RESULT = "result.json"
EVENTS = "events.jsonl"
FAILURE = "failure-{}.json"
WAIT_SECONDS = 1800.0
"""Longest wait of one process for another: more than an engine takes to start, and a hang beyond
that is an error. A process that dies is noticed at once by the launcher."""
LINGER_SECONDS = 5.0
"""A process that failed stays so long. Had it lost its connection to one that was killed, the
launcher sees that one first; and what ends all of them, the first of them tells best."""


class Task(Record):
    """What the processes are started with, written as JSON."""

    node: str
    key: str
    run_id: str
    seed: int
    store: Path
    inputs: dict[str, Artifact]
    """Folder and manifest of each, by role; the stage's worker has checked their files."""
    out_dir: Path
    work_dir: Path
    sections: Sections

    @staticmethod
    def of(ctx: StageContext, sections: Sections) -> Task:
        """The task of a stage that was handed `ctx`."""
        return Task(
            node=ctx.node,
            key=ctx.key,
            run_id=ctx.run_id,
            seed=ctx.seed,
            store=ctx.store.root,
            inputs=dict(ctx.inputs),
            out_dir=ctx.out_dir,
            work_dir=ctx.work_dir,
            sections=sections,
        )

    def context(self, emit: Callable[[dict[str, Any]], None]) -> StageContext:
        """The stage's context with another sink of events."""
        return StageContext(
            node=self.node,
            key=self.key,
            run_id=self.run_id,
            seed=self.seed,
            store=Store(self.store),
            inputs=self.inputs,
            out_dir=self.out_dir,
            work_dir=self.work_dir,
            emit=emit,
        )


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    rank: int
    is_users: bool
    """Whether the user can mend it."""
    message: str
    time: float
    """Seconds since 1970."""

    @staticmethod
    def read(file: Path) -> Failure:
        """What a process has left."""
        return Failure(**json.loads(file.read_text(encoding="utf-8")))


def _emitter(folder: Path, rank: int) -> Callable[[dict[str, Any]], None]:
    """Writes the first process's events for the stage's own process; the others are silent."""
    if rank:
        return lambda event: None
    file = (folder / EVENTS).open("a", encoding="utf-8", buffering=1)

    def emit(event: dict[str, Any]) -> None:
        file.write(json.dumps(event) + "\n")

    return emit


def _meet(folder: Path, rank: int) -> None:
    """Connect to the other processes; the trainer takes the connection over. They find each other
    in a file: PyTorch's store by TCP would listen to the whole network."""
    count = int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=torch.distributed.FileStore(str(folder / MEETING), count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    state = PartialState(cpu=not on_gpu)  # what the stage asks for its number of processes
    assert state.num_processes == count, state


def _train(folder: Path, rank: int) -> None:
    _meet(folder, rank)
    task = Task.model_validate_json((folder / TASK).read_text(encoding="utf-8"))
    sections = task.sections
    if rank:
        sections = replace(sections, wandb=WandbConfig(mode="disabled"))
    ctx = task.context(_emitter(folder, rank))
    os.chdir(ctx.work_dir)
    trained = train(ctx, sections, *prepare(ctx, sections))
    if rank == 0:
        write_durably(folder / RESULT, json.dumps(asdict(finish(ctx, sections, trained))))


def main(folder: Path) -> int:
    """Train; the exit code."""
    rank = int(os.environ["RANK"])
    try:
        _train(folder, rank)
    except Exception as error:
        traceback.print_exc()
        is_users = isinstance(error, UserError)
        found = Failure(rank, is_users, str(error) if is_users else in_one_line(error), time.time())
        write_durably(folder / FAILURE.format(rank), json.dumps(asdict(found)))
        sys.stderr.flush()
        if rank or not is_users:
            time.sleep(LINGER_SECONDS)
        return EXIT_USER_ERROR if is_users else 1
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as tasks.runtime.worker does: no engine's exit handler shall hang what is done
