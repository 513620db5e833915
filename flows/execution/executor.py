"""Carries out a run, node by node; knows nothing of Prefect.

Whether a node's stage is reused, run or waited for is decided here, from the store alone, and the
run record is kept here. The flows wrap each node for Prefect; a run in which everything exists
already needs no wrapping (`flows.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from rich.markup import escape

from flows.execution.events import Audience
from flows.execution.terminal import Display, duration
from ratchet.config.run import RunConfig
from ratchet.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from ratchet.pipeline.dag import STAGES
from ratchet.pipeline.plan import Plan, PlannedNode, make_plan
from ratchet.report.headlines import headline
from ratchet.store.lock import hold
from ratchet.store.runs import (
    NodeState,
    RunStatus,
    carrying_out,
    load_run,
    log_file,
    now,
    update_run,
)
from ratchet.store.store import Artifact, Store
from tasks.runtime.job import InputRef, Job
from tasks.runtime.launch import Event, StopRequest, WorkerOutcome, WorkerState, run_supervised

EXIT_CODES = {
    WorkerState.USER_ERROR: EXIT_USER_ERROR,
    WorkerState.CRASHED: 1,
    WorkerState.STOPPED: EXIT_INTERRUPTED,
    WorkerState.REFUSED: 1,
}
Slot = Callable[[], AbstractContextManager[None]]
STOPPED = "stopped; the same command continues here"
ENDED = "ended from outside (SIGTERM); the same command continues here"


@dataclass(frozen=True)
class NodeOutcome:
    """What became of a node."""

    name: str
    stage: str
    key: str
    state: NodeState
    worker_state: WorkerState
    message: str = ""
    seconds: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the artifact is there."""
        return self.state in (NodeState.REUSED, NodeState.DONE)

    @property
    def ref(self) -> str:
        """`stage/key`."""
        return f"{self.stage}/{self.key}"


def _judged(worker: WorkerOutcome) -> WorkerOutcome:
    """The worker's end, turned into a refusal where what it made says that the run mustn't go on
    (`refused` in its summary). The artifact is there all the same."""
    done = worker.state in (WorkerState.BUILT, WorkerState.REUSED)
    if done and (reason := worker.summary.get("refused")):
        return replace(worker, state=WorkerState.REFUSED, message=reason)
    return worker


class RunExecutor:
    """One run while it is carried out."""

    def __init__(self, store: Store, run_id: str, display: Audience | None = None) -> None:
        self.store = store
        self.record = load_run(store, run_id)
        self.config = RunConfig.model_validate(self.record.config)
        based_on = self.record.based_on
        self.plan: Plan = make_plan(
            self.config,
            store,
            force=frozenset(self.record.force),
            previous=None if based_on is None else load_run(store, based_on),
        )
        # The code may have changed since the run was recorded, and keys with it.
        for planned in self.plan.nodes:
            self.record = self.record.with_node(planned.node.name, key=planned.key)
        self.needed = self.plan.needed(self.record.targets, self.config)
        self.display = display or Display([planned.node.name for planned in self.needed])
        self.stop = StopRequest()
        self.ended_from_outside = False
        """Whether a stop is nobody's wish: the process was told to end."""
        self._carrying = ExitStack()
        self.outcomes: dict[str, NodeOutcome] = {}
        self._checked: dict[str, Artifact] = {}

    @property
    def is_whole_run(self) -> bool:
        """Whether every node is asked for."""
        return len(self.record.targets) == len(self.record.nodes)

    def everything_is_there(self) -> bool:
        """Whether every needed artifact exists and is undamaged, so that no stage would run."""
        if any(planned.state == "run" for planned in self.needed):
            return False
        return all(self.reusable(planned) is not None for planned in self.needed)

    def artifact(self, name: str) -> Artifact | None:
        """The artifact of a node, if it is complete."""
        planned = self.plan.named(name)
        return self.store.find(planned.node.stage, planned.key)

    def begin(self, prefect_flow_run_id: str | None = None) -> None:
        """The run starts; nobody else carries it out until it has finished."""
        self._carrying.enter_context(
            carrying_out(
                self.store,
                self.record.run_id,
                lambda who: self.display.line(f"this run is being carried out: {who}"),
            )
        )
        for planned in self.needed:  # what an earlier attempt left
            self.record = self.record.with_node(
                planned.node.name, state=NodeState.PENDING, seconds=None, message=""
            )
        self._update(
            status=RunStatus.RUNNING,
            message="",
            finished_at=None,
            prefect_flow_run_id=prefect_flow_run_id,
        )

    def reusable(
        self, planned: PlannedNode, log: Callable[[str], None] | None = None
    ) -> Artifact | None:
        """The node's artifact if it is there, undamaged and not to be made anew; its bytes are read
        once a run."""
        name = planned.node.name
        if name not in self._checked and name not in self.record.force:
            found = self.store.reusable(planned.node.stage, planned.key, log or self.display.line)
            if found is None:
                return None
            self._checked[name] = found
        return self._checked.get(name)

    def run_node(
        self,
        planned: PlannedNode,
        *,
        listen: Callable[[Event], None] | None = None,
        prefect: dict[str, str] | None = None,
        slot: Slot = nullcontext,
    ) -> NodeOutcome:
        """Find the node's artifact or run its stage.

        `listen` hears the worker's events, `prefect` goes into the manifest, `slot` is held, beside
        the store's own device lock, while a stage runs that needs the device.
        """
        name = planned.node.name
        self.display.begin(name)

        def on_event(event: Event) -> None:
            self.display.update(event)
            if listen is not None:
                listen(event)

        def log(message: str) -> None:
            on_event({"event": "log", "message": message})

        if (found := self.reusable(planned, log)) is not None:
            worker = WorkerOutcome(WorkerState.REUSED, summary=found.manifest.summary)
        elif self.stop.wanted:
            worker = WorkerOutcome(WorkerState.STOPPED)
        else:
            self._update_node(name, state=NodeState.RUNNING)
            with self._device(planned, on_event, slot):
                worker = run_supervised(self._job(planned, prefect or {}), on_event, self.stop)
        return self._note(planned, worker)

    def broken_off(self, planned: PlannedNode, *, from_outside: bool) -> NodeOutcome:
        """The node's outcome when the process was told to end in the middle of it."""
        self.ended_from_outside = from_outside
        self.stop()
        return self._note(planned, WorkerOutcome(WorkerState.STOPPED))

    def halt(self, why: str) -> None:
        """Say why, and end the running worker; the run then ends in good order."""
        self.display.line(why)
        self.stop()

    def finish(self, error: BaseException | None = None) -> int:
        """The run ended; the exit code. Prints the verdict, or what stopped it."""
        stopped = RunStatus.DIED if self.ended_from_outside else RunStatus.CANCELLED
        with self._carrying:
            if error is not None:
                message = str(error) or f"interrupted: {type(error).__name__}"
                for name, node in self.record.nodes.items():
                    if node.state is NodeState.RUNNING:
                        self._update_node(name, state=NodeState.FAILED, message=message)
                status = RunStatus.FAILED if isinstance(error, Exception) else stopped
                self._close(status, message)
                return 1
            failed = next((one for one in self.outcomes.values() if not one.ok), None)
            if failed is None:
                verdict = self.verdict()
                self._close(RunStatus.COMPLETED, verdict)
                self._tell_result(verdict)
                return 0
            is_stop = failed.worker_state is WorkerState.STOPPED
            status = stopped if is_stop else RunStatus.FAILED
            self._close(status, failed.message)
            return 1 if status is RunStatus.DIED else EXIT_CODES[failed.worker_state]

    def close_if_planned(self, error: BaseException) -> None:
        """Close the record after `error` if nobody has begun to carry the run out."""
        if load_run(self.store, self.record.run_id).status is RunStatus.PLANNED:
            self.finish(error)

    def verdict(self) -> str:
        """The comparison's verdict in words; empty when the run didn't go that far."""
        return next(
            (
                str(outcome.summary["verdict"])
                for outcome in self.outcomes.values()
                if outcome.stage == "compare"
            ),
            "",
        )

    @contextmanager
    def _device(
        self, planned: PlannedNode, on_event: Callable[[Event], None], slot: Slot
    ) -> Iterator[None]:
        """For a stage that needs the device: the store's lock (gone with its owner, kill -9
        included) and the caller's slot."""
        if not STAGES[planned.node.stage].needs_device:
            yield
            return

        def waiting(message: str) -> None:
            on_event({"event": "waiting", "message": f"the device is taken: {message}"})

        with hold(self.store.root / ".locks" / "device.lock", waiting), slot():
            yield

    def _job(self, planned: PlannedNode, prefect: dict[str, str]) -> Job:
        node = planned.node
        inputs = {role: self.plan.named(name) for role, name in node.inputs.items()}
        return Job(
            store=self.store.root,
            run_id=self.record.run_id,
            node=node.name,
            stage=node.stage,
            key=planned.key,
            sections=planned.sections,
            fingerprints=planned.fingerprints,
            code_version=planned.code_version,
            inputs={
                role: InputRef(stage=above.node.stage, key=above.key)
                for role, above in inputs.items()
            }
            | {role: InputRef(stage=stage, key=key) for role, (stage, key) in node.given.items()},
            seed=self.config.seed,
            force=node.name in self.record.force,
            log_file=log_file(self.store, self.record.run_id, node.name),
            prefect=prefect,
        )

    def _note(self, planned: PlannedNode, worker: WorkerOutcome) -> NodeOutcome:
        """Turn the worker's end into the node's, on record and on screen."""
        worker = _judged(worker)
        state = {
            WorkerState.REUSED: NodeState.REUSED,
            WorkerState.BUILT: NodeState.DONE,
        }.get(worker.state, NodeState.FAILED)
        message = worker.message
        if worker.state is WorkerState.STOPPED:
            message = ENDED if self.ended_from_outside else STOPPED
        outcome = NodeOutcome(
            planned.node.name,
            planned.node.stage,
            planned.key,
            state,
            worker.state,
            message,
            worker.seconds,
            worker.summary,
        )
        self.outcomes[outcome.name] = outcome
        self._update_node(
            outcome.name,
            write=state is not NodeState.REUSED,
            state=state,
            seconds=round(worker.seconds, 3),
            message=message,
        )
        took = f"{duration(worker.seconds):<12}" if state is NodeState.DONE else ""
        shown = "stopped" if worker.state is WorkerState.STOPPED else state.value
        self.display.end(
            shown, planned.key, message or took + headline(outcome.stage, worker.summary)
        )
        return outcome

    def _tell_result(self, verdict: str) -> None:
        report = self.outcomes.get("report")
        if verdict:
            self.display.line("\n[bold]Verdict[/]")
            for part in verdict.split(" | "):
                self.display.line(f"  {escape(part)}")
        if report is not None:
            path = self.store.folder(report.stage, report.key) / "report.html"
            self.display.line(f"[bold]Report[/]  {path}")

    def _close(self, status: RunStatus, message: str) -> None:
        self._update(status=status, message=message, finished_at=now())

    def _update_node(self, name: str, *, write: bool = True, **changes: Any) -> None:
        """Change a node's record. Without `write` it reaches the disk with the next change that
        does: each write waits for the disk, which adds up where all is reused."""
        self.record = self.record.with_node(name, **changes)
        if write:
            update_run(self.store, self.record)

    def _update(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        update_run(self.store, self.record)
