"""Makers of shards, and the two ways to put them to work on one machine.

A `Maker` has an engine and makes one shard after the other. `make_here` uses one in this process;
`make_in_processes` starts several processes, each with a device of its own (`CUDA_VISIBLE_DEVICES`)
where there are GPUs, and hands each the next missing shard when it is free. When a process dies,
its shard goes to another; with the last one the stage ends, and the shards that are finished stay.
Makers end with the process that started them, kill -9 included. On a CPU each uses as many threads
as a lone one would: another number could round otherwise, and the shards shall be the same.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from ratchet.config.run import ModelConfig, SamplerConfig, WorkersConfig
from ratchet.errors import UserError
from tasks.runtime.context import StageContext
from tasks.runtime.supervisor import die_with_parent
from tasks.runtime.worker import set_environment
from tasks.sampling.engines import OnProgress, Sampler, open_sampler
from tasks.sampling.progress import Progress
from tasks.sampling.shards import Made, Shard, ShardStore

Todo = Mapping[str, Shard]
"""Shards to make, by key."""

ENDED_BY_US = 5.0
"""Seconds a maker has to end by itself once there is nothing left to do."""


@dataclass(frozen=True)
class Work:
    """What every maker of a stage's shards must know."""

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


class Maker:
    """Makes shards one after the other; its engine is opened for the first that is missing."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.shards = ShardStore(work.ctx, work.model_config, work.sampler)
        self._stack = ExitStack()
        self._engine: Sampler | None = None

    def make(self, shard: Shard, key: str, on_progress: OnProgress) -> Made:
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
    maker = Maker(work)
    made: dict[str, Made] = {}
    try:
        for key, shard in missing.items():
            made[key] = maker.make(shard, key, progress.watch(0))
            progress.finish(0, shard.num_completions, made[key].num_tokens)
    finally:
        maker.close()
    return made


def devices() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = list(map(str, range(torch.cuda.device_count())))
    return found if names is None else [name.strip() for name in names.split(",")][: len(found)]


def num_makers(workers: WorkersConfig, num_shards: int) -> int:
    """How many processes make `num_shards` shards on this machine; UserError when more are asked
    for than it has GPUs or, without one, cores."""
    if workers.count == 1:
        return 1
    gpus = len(devices())
    limit, what = (gpus, "GPUs in sight") if gpus else (os.cpu_count() or 1, "CPU cores and no GPU")
    if workers.count > limit:
        raise UserError(
            f"workers.count = {workers.count}, but this machine has {limit} {what}: lower it"
        )
    return min(workers.count, num_shards)


@dataclass(eq=False)
class _Hand:
    """A process that makes shards."""

    number: int
    process: SpawnProcess
    pipe: Connection
    key: str | None = None
    """The shard it is at."""

    def end_in_words(self) -> str:
        """How the process ended."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        hint = " (out of memory?)" if code == -9 else ""
        how = f"by signal {-code}{hint}" if code < 0 else f"with code {code}"
        return f"sampling worker {self.number} (process {self.process.pid}) ended {how}"


@dataclass(eq=False)
class _Crew:
    """The processes at work and what is left to do."""

    work: Work
    missing: Todo
    progress: Progress
    todo: deque[str]
    hands: list[_Hand] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """How processes ended that shouldn't have."""
    made: dict[str, Made] = field(default_factory=dict)

    def start(self, number: int, device: str | None) -> None:
        """Start one process and give it a shard."""
        spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads halfway
        pipe, other = spawn.Pipe()
        process = spawn.Process(
            target=_serve, args=(self.work.elsewhere(), other, device, os.getpid()), daemon=False
        )
        process.start()
        other.close()  # so that its end is seen here, and ours there
        hand = _Hand(number, process, pipe)
        self.hands.append(hand)
        self.give(hand)

    def give(self, hand: _Hand) -> None:
        """The next shard, if there is one."""
        hand.key = self.todo.popleft() if self.todo else None
        if hand.key is not None:
            try:
                hand.pipe.send((hand.key, self.missing[hand.key]))
            except (BrokenPipeError, ConnectionResetError):
                self.lose(hand)

    def hear(self, hand: _Hand) -> None:
        """Take in one message of a process, or its end."""
        try:
            kind, *said = hand.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.lose(hand)
            return
        if kind == "event":
            self.work.ctx.emit(said[0])
        elif kind == "progress":
            self.progress.tell(hand.number, *said)
        elif kind == "made":
            assert hand.key is not None
            self.made[hand.key] = said[0]
            num_completions = self.missing[hand.key].num_completions
            self.progress.finish(hand.number, num_completions, said[0].num_tokens)
            self.give(hand)
        else:
            error: Callable[[str], Exception] = UserError if kind == "user" else RuntimeError
            raise error(f"sampling worker {hand.number}: {said[0]}")

    def lose(self, hand: _Hand) -> None:
        """A process died; its shard is done by another, idle ones included."""
        self.hands.remove(hand)
        self.ends.append(hand.end_in_words())
        self.progress.drop(hand.number)
        if hand.key is None:
            return
        self.todo.appendleft(hand.key)
        if not self.hands:
            raise RuntimeError(
                f"{'; '.join(self.ends)}. {len(self.made)} of {len(self.missing)} missing shards "
                "are finished and kept: the same command continues"
            )
        self.work.ctx.log(f"{self.ends[-1]}; its shard goes to another")
        idle = next((other for other in self.hands if other.key is None), None)
        if idle is not None:
            self.give(idle)

    def run(self) -> None:
        """Until every shard is made."""
        while len(self.made) < len(self.missing):
            ready = wait([hand.pipe for hand in self.hands])
            for hand in list(self.hands):
                if hand.pipe in ready and hand in self.hands:  # the dead are removed meanwhile
                    self.hear(hand)

    def dismiss(self) -> None:
        """Nothing is left to do, or something failed: end all processes."""
        for hand in self.hands:
            hand.pipe.close()
            if hand.key is not None:
                hand.process.terminate()
        for hand in self.hands:
            hand.process.join(ENDED_BY_US)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join()


def make_in_processes(work: Work, missing: Todo, progress: Progress, count: int) -> dict[str, Made]:
    """Make the shards in `count` processes, by key.

    UserError and RuntimeError as a process says; RuntimeError when all of them died.
    """
    names: list[str] | list[None] = devices() or [None] * count
    crew = _Crew(work, missing, progress, deque(missing))
    work.ctx.log(f"{count} sampling workers")
    try:
        for number, device in enumerate(names[:count], start=1):
            crew.start(number, device)
        crew.run()
    finally:
        crew.dismiss()
    return crew.made


def _serve(work: Work, pipe: Connection, device: str | None, parent: int) -> None:
    """The life of a maker's process: make what comes through the pipe until it is closed."""
    die_with_parent(parent)
    set_environment()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    maker = Maker(
        replace(work, ctx=replace(work.ctx, emit=lambda event: pipe.send(("event", event))))
    )
    try:
        while True:
            key, shard = pipe.recv()
            pipe.send(
                ("made", maker.make(shard, key, lambda *done: pipe.send(("progress", *done))))
            )
    except (EOFError, BrokenPipeError):
        maker.close()
    except UserError as error:
        pipe.send(("user", str(error)))
    except Exception as error:
        traceback.print_exc()
        what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        pipe.send(("crash", f"{what} (the log has its traceback)"))
    # Without interpreter shutdown, as in tasks.runtime.worker: no engine's exit handler shall hang.
    os._exit(0)
