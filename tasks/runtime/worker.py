"""Runs one stage in a process of its own: `python -m tasks.runtime.worker JOB.json`.

A stage's process is its own so that device memory is freed when it ends and a crash stays inside.
Events go to standard output as JSON lines; everything that the stage or its libraries print, C++
code included, is turned away into the job's log file. The last event is `done` (`built` or
`reused`) or `error` (`user`: exit code 2, `crash`: exit code 1, with the traceback in the log).

The artifact's lock is held throughout, so two runs asking for one key do the work once, and
existing work is checked byte by byte before it is used, as are the inputs. Killed at any moment,
the worker leaves no artifact or a complete one; unfinished state stays in the stage's `work_dir`
for the next attempt. Nothing heavy is imported before the environment is set.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ratchet.config.run import RunConfig, Section
from ratchet.errors import EXIT_USER_ERROR, UserError, in_one_line
from ratchet.store.store import Artifact, Store
from tasks.runtime.context import StageContext, StageResult
from tasks.runtime.job import InputRef, Job

Emit = Callable[[dict[str, Any]], None]

ENVIRONMENT = {
    # GNU OpenMP's idle threads spin otherwise: small matrix products become 10 to 30 times slower
    # as soon as another process wants the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")


def set_environment() -> None:
    """Settings that libraries read when they are loaded; what the user has set wins."""
    on_gpu = any(Path(file).exists() for file in GPU_DEVICE_FILES)
    for name, value in (ENVIRONMENT if on_gpu else ENVIRONMENT | CPU_ENVIRONMENT).items():
        os.environ.setdefault(name, value)


def redirect_output(log_file: Path) -> Emit:
    """Send file descriptors 1 and 2 to the log; the sink of events is what 1 was."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    guard = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        line = json.dumps(event)
        with guard:
            events.write(line + "\n")

    return emit


def _sections(job: Job) -> dict[str, Section]:
    """The job's configuration sections as the models that the stage expects."""
    found: dict[str, Section] = {}
    for name, values in job.sections.items():
        model = RunConfig.model_fields[name].annotation
        assert isinstance(model, type) and issubclass(model, Section)
        found[name] = model.model_validate(values)
    return found


def _sound_input(store: Store, role: str, ref: InputRef) -> Artifact:
    """An input artifact whose every byte is as it was written; UserError otherwise."""
    artifact = store.find(ref.stage, ref.key)
    if artifact is None:
        raise UserError(
            f"input '{role}' ({ref.stage}/{ref.key}) isn't in {store.root}: run the whole "
            "pipeline again, it is made anew"
        )
    if (damage := store.damage(artifact)) is not None:
        raise UserError(
            f"input '{role}' ({artifact.ref}) is damaged: {damage}. Run the whole pipeline again, "
            "it is made anew"
        )
    return artifact


def _build(job: Job, store: Store, emit: Emit) -> Artifact:
    """Run the stage and commit what it made."""
    from tasks.runtime.manifests import new_manifest

    inputs = {role: _sound_input(store, role, ref) for role, ref in job.inputs.items()}
    started_at = time.time()
    run = resolve_name(job.run)
    with store.build(job.stage, job.key) as build:
        context = StageContext(
            node=job.node,
            key=job.key,
            run_id=job.run_id,
            seed=job.seed,
            store=store,
            inputs=inputs,
            out_dir=build.out_dir,
            work_dir=build.work_dir,
            emit=emit,
        )
        os.chdir(build.work_dir)  # stray files of libraries go where they are cleaned up
        result: StageResult = run(context, **_sections(job))
        os.chdir(store.root)
        manifest = new_manifest(job, result, inputs, build.out_dir, started_at)
        return store.commit(build, manifest)


def run_job(job: Job, emit: Emit) -> None:
    """Bring the job's artifact about, or find it; emits `done`. Errors are the caller's."""
    store = Store(job.store)
    started = time.monotonic()

    def log(message: str) -> None:
        emit({"event": "log", "message": message})

    def on_wait(message: str) -> None:
        emit({"event": "waiting", "message": message})

    with store.lock(job.stage, job.key, on_wait):
        artifact = None if job.force else store.reusable(job.stage, job.key, log)
        state = "built" if artifact is None else "reused"
        if artifact is None:
            artifact = _build(job, store, emit)
    emit(
        {
            "event": "done",
            "state": state,
            "summary": artifact.manifest.summary,
            "seconds": time.monotonic() - started,
        }
    )


def main(job_file: Path) -> int:
    """Run the job in `job_file`; the exit code."""
    job = Job.model_validate_json(job_file.read_text(encoding="utf-8"))
    set_environment()
    emit = redirect_output(job.log_file)
    try:
        run_job(job, emit)
    except UserError as error:
        traceback.print_exc()
        emit({"event": "error", "kind": "user", "message": str(error)})
        return EXIT_USER_ERROR
    except Exception as error:
        traceback.print_exc()
        message = f"{in_one_line(error)}; see {job.log_file}"
        emit({"event": "error", "kind": "crash", "message": message})
        return 1
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without interpreter shutdown: the artifact is committed, and no engine's exit handler shall
    # hang or fail a stage that is done. The supervisor ends what is left.
    os._exit(code)
