"""A recorded run as a Prefect flow, a subflow per stage.

The run record in the store says what to do (`ratchet run`, `ratchet stage` and `ratchet audit-sync`
write it), so a flow's parameters are two short strings, and the three flows differ in nothing but
their name. Each stage is a subflow named after its node, its runs after the artifact's key; what a
subflow returns goes into those below it, which draws the pipeline's arrows in the run graph. The
store decides what is reused: an artifact found there ends its subflow as `Cached`, whatever
Prefect's own cache or database remember, and so a retried run repeats only what isn't done.

Failures are returned as states with one line, not raised: a stage that ran out of memory is no
fault in this code, and its traceback lies in its log. A failed audit ends its flow as `Refused`,
with the diagnosis as its message.

Launch: `ratchet run`, or any Prefect deployment of `full`, `stage` or `audit` in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, tags
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed
from prefect.utilities.engine import link_state_to_flow_run_result

from flows.execution.events import Recorder, events_file
from flows.execution.executor import ENDED, NodeOutcome, RunExecutor
from flows.execution.terminal import KEY_DIGITS, at_ctrl_c
from flows.pages.publish import ProgressPage, RunPages, create_device_limit, device_slot
from flows.pages.run_page import drawn_inputs
from flows.pipeline.stopping import cancel_is_wanted, watching_for_cancel
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
    message = f"{outcome.name}: {outcome.message}"
    if outcome.worker_state is WorkerState.REFUSED:
        return State(type=StateType.FAILED, name=REFUSED, message=message)
    ending = {WorkerState.STOPPED: Cancelled, WorkerState.CRASHED: Crashed}
    made = Crashed if outcome.message == ENDED else ending.get(outcome.worker_state, Failed)
    return made(message=message)


def _node_flow(
    executor: RunExecutor, planned: PlannedNode, pages: RunPages
) -> Callable[..., State[Any]]:
    """The subflow that runs a node and tells Prefect of it; call it with `return_state=True`."""

    def run_node(node: str, key: str, inputs: dict[str, str]) -> State[Any]:
        progress = ProgressPage(executor.record.name, node)
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
                prefect={"flow_run_id": str(flow_run.id)},
                slot=device_slot if is_shared() else nullcontext,
            )
        except TerminationSignal:
            asked = cancel_is_wanted(executor.record.prefect_flow_run_id)
            outcome = executor.broken_off(planned, from_outside=not asked)
        pages.stage_ended(planned, outcome)
        return _final_state(outcome)

    # In a retried run Prefect finds a subflow again by its function's name and how often it was
    # called: the same name for all would mix them up as soon as one is called twice.
    run_node.__qualname__ = planned.node.name.replace(".", "_")
    short_key = planned.key[:KEY_DIGITS]
    return flow(name=planned.node.name, flow_run_name=short_key, persist_result=False)(run_node)


def _heartbeats(planned: PlannedNode) -> AbstractContextManager[Any]:
    """No heartbeat for a subflow that will be over at once: ending one takes up to a second."""
    if planned.state == "reuse":
        return temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    return nullcontext()


def _run_nodes(executor: RunExecutor, pages: RunPages) -> State[Any] | None:
    """Run the nodes in order; the state of the one that stopped the run, or None.

    When a run is retried, Prefect gives back the subflows that were completed without running
    them. The store has the last word: what is gone from it runs again.
    """
    refs: dict[str, str] = {}
    for planned in executor.needed:
        name = planned.node.name
        inputs = {role: refs[above] for role, above in drawn_inputs(planned).items()}
        asked = {"node": name, "key": planned.key, "inputs": inputs}
        subflow = _node_flow(executor, planned, pages)
        with _heartbeats(planned):
            state = subflow(**asked, return_state=True)
            if state.is_completed() and name not in executor.outcomes:
                if executor.reusable(planned) is not None:
                    executor.run_node(planned)  # on the record and on screen
                else:
                    state = subflow(**asked, return_state=True)
        if name not in executor.outcomes:
            state.result()  # raises what escaped: a fault of ours
        if not state.is_completed():
            return state
        # Prefect follows returned values; ours come as states, for their names, so we link them.
        refs[name] = executor.outcomes[name].ref
        link_state_to_flow_run_result(state, refs[name])
    return None


def carry_out(store: str, run_id: str) -> State[Any]:
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

    def stop() -> None:
        executor.halt("stopping; what is done stays (Ctrl-C again to break off)")

    watching = watching_for_cancel if recorder is None and is_shared() else nullcontext
    try:
        with at_ctrl_c(stop), watching(executor), tags(*pages.tags):
            stopped_by = _run_nodes(executor, pages)
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
    return carry_out(store, run_id)


stage = full.with_options(
    name="stage",
    description="One stage of an existing run, with what lies below it if that was asked for.",
)
audit = full.with_options(
    name="audit", description="Audit the weight sync between trainer and sampler."
)
FLOWS = {recorded.name: recorded for recorded in (full, stage, audit)}
"""What carries out a recorded run, by its name in Prefect."""
