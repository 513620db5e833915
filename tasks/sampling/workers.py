"""What makes shards, and the two ways to put it to work on one machine.

A `ShardWorker` has an engine and makes one shard after the other. `make_here` uses one in this
process; `make_in_processes` starts several processes, each with a device of its own
(`CUDA_VISIBLE_DEVICES`) where there are GPUs, and hands each the next missing shard when it is
free. When a process dies, its shard goes to another; with the last one the stage ends, and the
shards that are finished stay. Workers end with the process that started them, kill -9 included. On
a CPU each uses as many threads as a lone one would: another number could round otherwise, and the
shards shall be the same.

Not `concurrent.futures`: one dead process breaks its pool, which then ends all others and can't say
how the one ended; busy processes can't be ended, and each would go through interpreter shutdown,
where an engine's exit handler can hang.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from ratchet.config.run import ModelConfig, SamplerConfig, WorkersConfig
from ratchet.errors import UserError, in_one_line
from ratchet.resources.device import cuda_names
from tasks.runtime.context import StageContext
from tasks.runtime.supervisor import by_signal, die_with_parent
from tasks.runtime.worker import set_environment
from tasks.sampling.engines import OnProgress, Sampler, open_sampler
from tasks.sampling.progress import Progress
from tasks.sampling.shards import Made, Shard, ShardStore

Todo = Mapping[str, Shard]
"""Shards to make, by key."""

ENDED_BY_US = 5.0
"""Seconds a worker has to end by itself once there is nothing left to do."""


@dataclass(frozen=True)
class Work:
    """What every worker of a stage's shards must know."""

    ctx: StageContext
    model_config: ModelConfig
    sampler: SamplerConfig
    longest_prompt: int
    """In tokens, of all the stage's shards: engines are opened with room for it."""

    def elsewhere(self) -> Work:
        """The same for another process, which can't be told where events go to."""
        return replace(self, ctx=replace(self.ctx, emit=_unheard))


def _unheard(event: dict[str, Any]) -> None:
    """The place of a sink that a process sets for itself."""


@contextmanager
def open_engine(work: Work) -> Iterator[Sampler]:
    """The engine that shards are drawn with."""
    # vLLM schedules requests in the same order every time only when it doesn't take them in from
    # another process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    work.ctx.log(f"loading the model into {work.sampler.engine}")
    with open_sampler(
        work.ctx.inputs["model"],
        model_config=work.model_config,
        sampler=work.sampler,
        max_prompt_tokens=work.longest_prompt,
    ) as engine:
        yield engine


class ShardWorker:
    """Makes shards one after the other; its engine is opened for the first that is missing."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.shards = ShardStore(work.ctx, work.model_config, work.sampler)
        self._stack = ExitStack()
        self._engine: Sampler | None = None

    def make(self, key: str, shard: Shard, on_progress: OnProgress) -> Made:
        """See `ShardStore.make`."""
        return self.shards.make(shard, key, self._open, on_progress)

    def _open(self) -> Sampler:
        if self._engine is None:
            self._engine = self._stack.enter_context(open_engine(self.work))
        return self._engine

    def close(self) -> None:
        """Close the engine."""
        self._stack.close()


def make_here(work: Work, missing: Todo, progress: Progress) -> dict[str, Made]:
    """Make the shards in this process, by key."""
    made: dict[str, Made] = {}
    with closing(ShardWorker(work)) as worker:
        for key, shard in missing.items():
            made[key] = worker.make(key, shard, partial(progress.tell, 0))
            progress.finish(0, shard.num_completions, made[key].num_tokens)
    return made


def num_processes(workers: WorkersConfig, num_shards: int) -> int:
    """How many processes make `num_shards` shards on this machine; UserError when more are asked
    for than it has GPUs or, without one, cores."""
    if workers.count == 1:
        return 1
    gpus = len(cuda_names())
    limit, what = (gpus, "GPUs in sight") if gpus else (os.cpu_count() or 1, "CPU cores and no GPU")
    if workers.count > limit:
        raise UserError(
            f"workers.count = {workers.count}, but this machine has {limit} {what}: lower it"
        )
    return min(workers.count, num_shards)


class _Process:
    """A process that makes shards, seen from the stage's."""

    def __init__(self, work: Work, number: int, device: str | None) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads halfway
        self.number = number
        self.key: str | None = None
        """The shard it is at."""
        self.pipe, other = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(work.elsewhere(), other, device, os.getpid()), daemon=False
        )
        self._process.start()
        other.close()  # so that its end is seen here, and ours there

    def end_in_words(self) -> str:
        """How the process ended."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        how = by_signal(-code) if code < 0 else f"with code {code}"
        return f"sampling worker {self.number} (process {self._process.pid}) ended {how}"

    def dismiss(self) -> None:
        """Ask it to end, at once if it is at a shard."""
        self.pipe.close()
        if self.key is not None:
            self._process.terminate()

    def join(self) -> None:
        """Wait for its end, and not for long."""
        self._process.join(ENDED_BY_US)
        self._process.kill()
        self._process.join()


class _Pool:
    """The processes at work and what is left to do."""

    def __init__(self, work: Work, missing: Todo, progress: Progress) -> None:
        self.work, self.missing, self.progress = work, missing, progress
        self.todo = [*missing][::-1]
        self.made: dict[str, Made] = {}
        self.processes: list[_Process] = []
        self.ends: list[str] = []
        """How processes ended that shouldn't have."""

    def run(self) -> None:
        """Until every shard is made."""
        while len(self.made) < len(self.missing):
            if not self.processes:
                raise RuntimeError(
                    f"{'; '.join(self.ends)}. {len(self.made)} of {len(self.missing)} missing "
                    "shards are finished and kept: the same command continues"
                )
            for process in self.processes:
                if process.key is None and self.todo:
                    process.key = self.todo.pop()
                    with suppress(BrokenPipeError, ConnectionResetError):  # its end is heard below
                        process.pipe.send((process.key, self.missing[process.key]))
            ready = wait([process.pipe for process in self.processes])
            for process in [process for process in self.processes if process.pipe in ready]:
                try:
                    message = process.pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._lose(process)
                else:
                    self._hear(process, *message)

    def _hear(self, process: _Process, kind: str, *said: Any) -> None:
        """Take in a message."""
        if kind == "event":
            self.work.ctx.emit(*said)
        elif kind == "progress":
            self.progress.tell(process.number, *said)
        elif kind == "made":
            assert process.key is not None
            (self.made[process.key],) = said
            num_completions = self.missing[process.key].num_completions
            self.progress.finish(process.number, num_completions, said[0].num_tokens)
            process.key = None
        else:
            error, words = said
            raise error(f"sampling worker {process.number}: {words}")

    def _lose(self, process: _Process) -> None:
        """A process died; a shard that it was at is done by another."""
        self.processes.remove(process)
        self.ends.append(process.end_in_words())
        self.progress.drop(process.number)
        if process.key is not None:
            self.todo.append(process.key)
            if self.processes:
                self.work.ctx.log(f"{self.ends[-1]}; its shard goes to another")


def make_in_processes(work: Work, missing: Todo, progress: Progress, count: int) -> dict[str, Made]:
    """Make the shards in `count` processes, by key.

    UserError and RuntimeError as a process says; RuntimeError when all of them died.
    """
    devices: list[str] | list[None] = cuda_names() or [None] * count
    pool = _Pool(work, missing, progress)
    work.ctx.log(f"{count} sampling workers")
    try:
        for number, device in enumerate(devices[:count], start=1):
            pool.processes.append(_Process(work, number, device))
        pool.run()
    finally:
        for process in pool.processes:
            process.dismiss()
        for process in pool.processes:
            process.join()
    return pool.made


def _serve(work: Work, pipe: Connection, device: str | None, parent: int) -> None:
    """The life of a worker's process: make what comes through the pipe until it is closed."""
    die_with_parent(parent)
    set_environment()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    ctx = replace(work.ctx, emit=lambda event: pipe.send(("event", event)))
    worker = ShardWorker(replace(work, ctx=ctx))
    try:
        while True:
            key, shard = pipe.recv()
            made = worker.make(key, shard, lambda *done: pipe.send(("progress", *done)))
            pipe.send(("made", made))
    except (EOFError, BrokenPipeError):
        worker.close()
    except UserError as error:
        pipe.send(("failed", UserError, str(error)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", RuntimeError, f"{in_one_line(error)} (the log has its traceback)"))
    # Without interpreter shutdown, as in tasks.runtime.worker: no engine's exit handler shall hang.
    os._exit(0)
