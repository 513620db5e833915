"""The weight-sync audit as a Prefect flow: is the sampler the trainer's policy?

A run record with the one target 'audit'; the model that it reads is found or made first. A failed
audit ends the flow as `Refused`, with the diagnosis as its message.

Launch: `ratchet audit-sync`, or any Prefect deployment of `flows.pipeline.flow_audit:audit`.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.pipeline.flow import conduct


@flow(name="audit", flow_run_name="{run_id}", persist_result=False)
def audit(store: str, run_id: str) -> State[Any]:
    """Audit the weight sync between trainer and sampler.

    Args:
        store: Folder of the store, absolute.
        run_id: A run recorded there.
    """
    return conduct(store, run_id)
