"""The whole pipeline as a Prefect flow, a subflow per stage.

The run record in the store says what to do (`ratchet run` and `ratchet stage` write it), so a
flow's parameters are two short strings. Each stage is a subflow named after its node, its runs
after the artifact's key; what a subflow returns goes into those below it, which draws the
pipeline's arrows in the run graph. The store decides what is reused: an artifact found there ends
its subflow as `Cached`, whatever Prefect's own cache or database remember, and so a retried run
repeats only what isn't done.

Failures are returned as states with one line, not raised: a stage that ran out of memory is no
fault in this code, and its traceback lies in its log.

Launch: `ratchet run`, or any Prefect deployment of `flows.pipeline.flow:full`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run, task_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed
from prefect.utilities.engine import link_state_to_flow_run_result

from flows.deployment.handover import Recorder, events_file
from flows.execution.executor import ENDED, NodeOutcome, RunExecutor
from flows.execution.terminal import KEY_DIGITS
from flows.pages.publish import ProgressPage, RunPages, create_device_limit, device_slot
from flows.pages.run_page import drawn_inputs
from flows.pipeline.stopping import cancel_is_wanted, on_ctrl_c, watching_for_cancel
from flows.server.server import is_shared
from ratchet.pipeline.plan import PlannedNode
from ratchet.store.runs import NodeState
from ratchet.store.store import Store
from tasks.runtime.launch import Event, WorkerState

REFUSED = "Refused"
"""State of a stage that is there and says that the run mustn't go on."""


def _final_state(outcome: NodeOutcome) -> State[Any]:
    """The Prefect state that tells what became of a node."""
    if outcome.ok:
        name = "Cached" if outcome.state is NodeState.REUSED else "Completed"
        return State(type=StateType.COMPLETED, name=name, message=outcome.ref, data=outcome.ref)
    if outcome.worker_state is WorkerState.REFUSED:
        words = f"{outcome.name}: {outcome.message}"
        return State(type=StateType.FAILED, name=REFUSED, message=words)
    ending = {WorkerState.STOPPED: Cancelled, WorkerState.CRASHED: Crashed}
    made = Crashed if outcome.message == ENDED else ending.get(outcome.worker_state, Failed)
    return made(message=f"{outcome.name}: {outcome.message}")


def _do(executor: RunExecutor, planned: PlannedNode, pages: RunPages) -> NodeOutcome:
    """Bring a node about inside its task, telling Prefect as it goes."""
    progress = ProgressPage(executor.record.name, planned.node.name)
    logger = get_run_logger()

    def listen(event: Event) -> None:
        if event["event"] == "progress":
            progress.update(event)
        else:
            logger.info(event["message"])

    pages.stage_begins(planned)
    try:
        outcome = executor.run_node(
            planned,
            listen=listen,
            prefect={"flow_run_id": str(flow_run.id), "task_run_id": str(task_run.id)},
            slot=device_slot if is_shared() else nullcontext,
        )
    except TerminationSignal:
        executor.ended_from_outside = not cancel_is_wanted(executor.record.prefect_flow_run_id)
        outcome = executor.broken_off(planned)
    pages.stage_ended(planned, outcome)
    return outcome


def _node_flow(
    executor: RunExecutor, planned: PlannedNode, pages: RunPages
) -> Callable[..., State[Any]]:
    """The subflow of a node; call it with `return_state=True`."""
    node = planned.node

    @task(
        name=node.name,
        task_run_name=planned.key[:KEY_DIGITS],
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def work() -> State[Any]:
        return _final_state(_do(executor, planned, pages))

    @flow(name=node.name, flow_run_name=planned.key[:KEY_DIGITS], persist_result=False)
    def bring_about(node: str, key: str, inputs: dict[str, str]) -> State[Any]:
        work(return_state=True)
        return _final_state(executor.outcomes[node])

    return bring_about


def _heartbeats(planned: PlannedNode) -> AbstractContextManager[Any]:
    """No heartbeat for a subflow that will be over at once: ending one takes up to a second."""
    if planned.state == "reuse":
        return temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    return nullcontext()


def _bring_about(
    executor: RunExecutor, planned: PlannedNode, pages: RunPages, inputs: dict[str, str]
) -> State[Any]:
    """The final state of a node's subflow.

    When a run is retried, Prefect gives back the subflows that were completed without running
    them. The store has the last word: what is gone from it runs again.
    """
    subflow = _node_flow(executor, planned, pages)
    asked = {"node": planned.node.name, "key": planned.key, "inputs": inputs}
    state = subflow(**asked, return_state=True)
    skipped = state.is_completed() and planned.node.name not in executor.outcomes
    if skipped and executor.found(planned) is None:
        state = subflow(**asked, return_state=True)
    return state


def _bring_all_about(executor: RunExecutor, pages: RunPages) -> State[Any] | None:
    """Run the nodes in order; the state of the one that stopped the run, or None."""
    refs: dict[str, str] = {}
    for planned in executor.needed:
        inputs = {role: refs[name] for role, name in drawn_inputs(planned).items()}
        with _heartbeats(planned):
            state = _bring_about(executor, planned, pages, inputs)
        if not state.is_completed():
            return state
        ref = executor.outcomes[planned.node.name].ref
        # Prefect follows returned values; ours come as states, for their names, so we link them.
        link_state_to_flow_run_result(state, ref)
        refs[planned.node.name] = ref
    return None


def conduct(store: str, run_id: str) -> State[Any]:
    """Carry out a run inside the present flow run; its final state.

    A served run is shown to whoever follows it; one in a terminal's own process is shown there.
    """
    opened = Store(Path(store))
    recorder = None if deployment.id is None else Recorder(events_file(opened, run_id))
    executor = RunExecutor(opened, run_id, recorder)
    executor.begin(flow_run.id)
    pages = RunPages(executor)
    pages.begin()
    if is_shared():
        create_device_limit()
    watching = watching_for_cancel if recorder is None and is_shared() else nullcontext
    try:
        with on_ctrl_c(executor), watching(executor), tags(*pages.tags):
            stopped_by = _bring_all_about(executor, pages)
    except BaseException as error:
        executor.ended_from_outside = isinstance(error, TerminationSignal) and not cancel_is_wanted(
            flow_run.id
        )
        executor.finish(error)
        raise
    verdict = executor.verdict()
    pages.update()
    code = executor.finish()
    if recorder is not None:
        recorder.exit(code)
    if stopped_by is not None:
        return State(type=stopped_by.type, name=stopped_by.name, message=stopped_by.message)
    return Completed(message=verdict or f"{len(executor.outcomes)} stages are there")


@flow(name="full", flow_run_name="{run_id}", persist_result=False)
def full(store: str, run_id: str) -> State[Any]:
    """The whole pipeline, from questions to the report.

    Args:
        store: Folder of the store, absolute.
        run_id: A run recorded there.
    """
    return conduct(store, run_id)
