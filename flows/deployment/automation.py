"""The automation that ends flow runs which fell silent: for machines that share no store with us.

`flows.deployment.serve` makes it. Prefect's flow runs send a heartbeat every 180 seconds unless
told otherwise (PREFECT_FLOWS_HEARTBEAT_FREQUENCY); the automation waits for three of them, or a
server that was away for a while would take living runs for dead.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY

NAME = "Ratchet: died without a word"
LEAST_SILENCE = timedelta(seconds=540)
ENDINGS = ("Completed", "Cached", "Failed", "Refused", "Cancelled", "Crashed")
"""Names of the states that a flow run of ours ends in; Prefect names its events after them."""


def silence() -> timedelta:
    """How long a flow run may be silent before it counts as dead: three heartbeats at least."""
    every = PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value() or 0
    return max(LEAST_SILENCE, timedelta(seconds=3 * every))


def silent_death() -> Automation:
    """The automation that ends flow runs whose heartbeats stopped."""
    heartbeat = "prefect.flow-run.heartbeat"
    return Automation(
        name=NAME,
        description="Marks a flow run as Crashed when it has sent no heartbeat for some minutes.",
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{name}" for name in ENDINGS)},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence(),
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                force=False,
                state=StateType.CRASHED,
                message="no heartbeat: its process died, or its machine is cut off",
            )
        ],
    )


def create_automation() -> None:
    """Make the automation unless it is there; one that a person changed or paused is left alone."""
    with get_client(sync_client=True) as client:
        missing = not client.read_automations_by_name(NAME)
    if missing:
        silent_death().create()
