"""Workers that make shards as Ray actors, for a cluster or for one machine.

Ray places the actors (each on a GPU of its own where the cluster has any), starts one anew when it
dies and gives it its shard again. Every node has Ratchet installed and sees the store and the model
under the same path; the store's locks work over NFS 4 and newer. Needs the extra `ray`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

from ratchet.config.run import WorkersConfig
from ratchet.errors import UserError
from tasks.runtime.worker import set_environment
from tasks.sampling.progress import Progress
from tasks.sampling.shards import Made, Shard
from tasks.sampling.workers import ShardWorker, Todo, Work

RESTARTS = 2
"""How often an actor that died is started again."""


class RayWorker:
    """A `ShardWorker` in an actor's process."""

    def __init__(self, work: Work, threads: str | None) -> None:
        set_environment()
        # Ray sets the number of threads to the actor's share of the CPU; another number than in a
        # process of the stage could round otherwise.
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        ctx = replace(work.ctx, emit=lambda event: print(event.get("message", ""), flush=True))
        self.worker = ShardWorker(replace(work, ctx=ctx))

    def make(self, key: str, shard: Shard) -> tuple[str, Made]:
        """Make a shard; its key with what it took. UserError where the store isn't seen: raised
        here it reaches the stage as it is, while an actor that can't be made is only a dead one."""
        model = self.worker.work.ctx.inputs["model"]
        if not model.folder.is_dir():
            raise UserError(
                f"a Ray node doesn't see {model.folder}: put the store where every node of the "
                "cluster finds it under the same path"
            )
        return key, self.worker.make(key, shard, lambda num_done, num_tokens: None)


def _connect(workers: WorkersConfig) -> tuple[Any, dict[str, float]]:
    """Ray, and what each actor takes of the cluster; UserError when that can't be had."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("workers.ray is set, but Ray isn't installed: install the extra 'ray'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if workers.ray == "local":
        # Whatever the name says, this makes Ray take loopback as its node's address; it would
        # listen to the whole network otherwise, even if that address were asked for in `init`.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    try:
        # Of a cluster that runs already, its dashboard isn't ours to set.
        dashboard = False if workers.ray == "local" else None
        ray.init(address=workers.ray, include_dashboard=dashboard)
    except (ConnectionError, ValueError) as error:
        raise UserError(
            f"no Ray cluster at workers.ray = '{workers.ray}' ({error}): start one with "
            "`ray start --head`, or set 'local'"
        ) from error
    there = ray.cluster_resources()
    name = "GPU" if there.get("GPU") else "CPU"
    if workers.count > there.get(name, 0):
        ray.shutdown()
        raise UserError(
            f"workers.count = {workers.count}, but the Ray cluster has {there.get(name, 0):g} "
            f"{name}s: lower it"
        )
    return ray, {"num_gpus": float(name == "GPU"), "num_cpus": 1.0}


def make_on_ray(
    work: Work, missing: Todo, progress: Progress, workers: WorkersConfig
) -> dict[str, Made]:
    """Make the shards with `workers.count` actors, by key.

    UserError when Ray, the cluster or enough of it isn't there; RuntimeError when an actor died
    more often than it may.
    """
    ray, share = _connect(workers)
    from ray.util import ActorPool

    made: dict[str, Made] = {}
    count = min(workers.count, len(missing))
    work.ctx.log(f"{count} sampling workers on Ray ({ray.get_runtime_context().gcs_address})")
    try:
        actor = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS, **share)(RayWorker)
        threads = os.environ.get("OMP_NUM_THREADS")
        pool = ActorPool([actor.remote(work.elsewhere(), threads) for _ in range(count)])
        progress.tell(0, 0, 0)
        todo = missing.items()
        for key, one in pool.map_unordered(lambda worker, item: worker.make.remote(*item), todo):
            made[key] = one
            progress.finish(0, missing[key].num_completions, one.num_tokens)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from error
        raise
    except ray.exceptions.RayActorError as error:
        cause = str(error).strip().splitlines()
        raise RuntimeError(
            f"a sampling worker on Ray ended {RESTARTS + 1} times: {' '.join(cause)}. {len(made)} "
            f"of {len(missing)} missing shards are finished and kept: the same command continues"
        ) from error
    finally:
        ray.shutdown()
    return made
