"""One stage of an existing run, as a Prefect flow.

The same machinery as the full flow: the run record names the stages to bring about, and what lies
above them is reused.

Launch: `ratchet stage NAME`, or any Prefect deployment of `flows.pipeline.flow_stage:stage`.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.pipeline.flow import conduct


@flow(name="stage", flow_run_name="{run_id}", persist_result=False)
def stage(store: str, run_id: str) -> State[Any]:
    """One stage of an existing run, with what lies below it if that was asked for.

    Args:
        store: Folder of the store, absolute.
        run_id: A run recorded there.
    """
    return conduct(store, run_id)
