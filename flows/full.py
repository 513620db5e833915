"""The whole pipeline as a Prefect flow, a subflow per stage.

The run record in the store says what to do (`ratchet run` and `ratchet stage` write it), so a
flow's parameters are two short strings. Each stage is a subflow named after its node, its runs
after the artifact's key; what a subflow returns goes into those below it, which draws the
pipeline's arrows in the run graph. The store decides what is reused: an artifact found there ends
its subflow as `Cached`, whatever Prefect's own cache or database remember, and so a retried run
repeats only what isn't done.

Failures are returned as states with one line, not raised: a stage that ran out of memory is no
fault in this code, and its traceback lies in its log.

Launch: `ratchet run`, or any Prefect deployment of `flows.full:full`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed
from prefect.utilities.engine import link_state_to_flow_run_result

from flows.conductor import Conductor, NodeOutcome
from flows.pages import drawn_inputs, node_page, run_page
from flows.publish import (
    ProgressPage,
    create_device_limit,
    device_slot,
    publish_page,
    run_tags,
    tag_this_run,
)
from flows.server import is_shared
from flows.terminal import KEY_DIGITS
from ratchet.plan import PlannedNode
from ratchet.store.runs import NodeState
from ratchet.store.store import Store
from tasks.launch import Event, WorkerState


def _final_state(outcome: NodeOutcome) -> State[Any]:
    """The Prefect state that tells what became of a node."""
    if outcome.ok:
        name = "Cached" if outcome.state is NodeState.REUSED else "Completed"
        return State(type=StateType.COMPLETED, name=name, message=outcome.ref, data=outcome.ref)
    ending = {WorkerState.STOPPED: Cancelled, WorkerState.CRASHED: Crashed}
    return ending.get(outcome.worker_state, Failed)(message=f"{outcome.name}: {outcome.message}")


def _do(conductor: Conductor, planned: PlannedNode) -> NodeOutcome:
    """Bring a node about inside its task, telling Prefect as it goes."""
    name, run_name = planned.node.name, conductor.record.name
    progress = ProgressPage(run_name, name)
    logger = get_run_logger()

    def listen(event: Event) -> None:
        if event["event"] == "progress":
            progress.update(event)
        else:
            logger.info(event["message"])

    outcome = conductor.bring_about(
        planned,
        listen=listen,
        prefect={"flow_run_id": str(flow_run.id), "task_run_id": str(task_run.id)},
        slot=device_slot if is_shared() else nullcontext,
    )
    publish_page(run_name, name, node_page(conductor, planned, outcome), f"{name} of {run_name}")
    return outcome


def _node_flow(conductor: Conductor, planned: PlannedNode) -> Callable[..., State[Any]]:
    """The subflow of a node; call it with `return_state=True`."""
    node = planned.node

    @task(
        name=node.name,
        task_run_name=planned.key[:KEY_DIGITS],
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def work() -> State[Any]:
        return _final_state(_do(conductor, planned))

    @flow(name=node.name, flow_run_name=planned.key[:KEY_DIGITS], persist_result=False)
    def bring_about(node: str, key: str, inputs: dict[str, str]) -> State[Any]:
        work(return_state=True)
        return _final_state(conductor.outcomes[node])

    return bring_about


def _heartbeats(planned: PlannedNode) -> AbstractContextManager[Any]:
    """No heartbeat for a subflow that will be over at once: ending one takes up to a second."""
    if planned.state == "reuse":
        return temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    return nullcontext()


@contextmanager
def _stopping_on_ctrl_c(conductor: Conductor) -> Iterator[None]:
    """Ctrl-C stops the worker and ends the run in good order; a second one breaks off at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        conductor.display.line("stopping; what is done stays (Ctrl-C again to break off)")
        conductor.stop()

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _bring_all_about(conductor: Conductor) -> State[Any] | None:
    """Run the nodes in order; the state of the one that stopped the run, or None."""
    refs: dict[str, str] = {}
    for planned in conductor.needed:
        inputs = {role: refs[name] for role, name in drawn_inputs(planned).items()}
        with _heartbeats(planned):
            state = _node_flow(conductor, planned)(
                node=planned.node.name, key=planned.key, inputs=inputs, return_state=True
            )
        if not state.is_completed():
            return state
        ref = state.result()
        # Prefect follows returned values; ours come as states, for their names, so we link them.
        link_state_to_flow_run_result(state, ref)
        refs[planned.node.name] = ref
    return None


def conduct(store: str, run_id: str) -> State[Any]:
    """Carry out a run inside the present flow run; its final state."""
    conductor = Conductor(Store(Path(store)), run_id)
    conductor.begin(flow_run.id)
    found = run_tags(conductor.config)
    tag_this_run(found)
    if is_shared():
        create_device_limit()
    try:
        with _stopping_on_ctrl_c(conductor), tags(*found):
            stopped_by = _bring_all_about(conductor)
    except BaseException as error:
        conductor.finish(error)
        raise
    verdict = conductor.verdict()
    name = conductor.record.name
    publish_page(name, "run", run_page(conductor, verdict), f"lineage and verdict of {run_id}")
    conductor.finish()
    if stopped_by is not None:
        return State(type=stopped_by.type, name=stopped_by.name, message=stopped_by.message)
    return Completed(message=verdict or f"{len(conductor.outcomes)} stages are there")


@flow(name="full", flow_run_name="{run_id}", persist_result=False)
def full(store: str, run_id: str) -> State[Any]:
    """The whole pipeline, from questions to the report.

    Args:
        store: Folder of the store, absolute.
        run_id: A run recorded there.
    """
    return conduct(store, run_id)
