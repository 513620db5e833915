"""The flows on a real Prefect server (Prefect's own test harness) with small real stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.runs import RunStatus, load_run, run_folder
from ratchet.store.store import Store
from tests.support.recorded_run import record, states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    """A Prefect server with a database of its own."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def flow_runs(**filters: Any) -> list[Any]:
    """Flow runs that match, oldest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(filters))
        return sorted(found, key=lambda run: run.expected_start_time)


def subflows(parent: Any) -> list[Any]:
    return flow_runs(parent_flow_run_id={"any_": [parent.id]})


def run_of(run_id: str) -> Any:
    """The flow run of a run; its name begins with the run's id."""
    (found,) = flow_runs(name={"like_": run_id})
    assert found.name.startswith(f"{run_id} ")
    return found


def flow_names(runs: list[Any]) -> list[str]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [client.read_flow(run.flow_id).name for run in runs]


def arrows(parent: Any) -> dict[str, set[str]]:
    """Names of the flows that each subflow's arrows come from, as the run graph draws them."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        graph = client._client.get(f"/flow_runs/{parent.id}/graph-v2").json()
    label = {key: node["label"].partition(" / ")[0] for key, node in graph["nodes"]}
    return {
        label[key]: {label[above["id"]] for above in node["parents"]}
        for key, node in graph["nodes"]
    }


def artifacts(run: Any) -> dict[str, Any]:
    """Artifacts of one flow run by key."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        )
    return {artifact.key: artifact for artifact in found}


def delete_flow_runs(parent: Any) -> None:
    """Forget a run and its subflows, as if Prefect's database had been deleted."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        for run in (*subflows(parent), parent):
            client.delete_flow_run(run.id)


def run_flow(store: Store, run_id: str) -> Any:
    from flows.pipeline.flow import stage

    return stage(store=str(store.root), run_id=run_id, return_state=True)


def test_a_subflow_per_stage_then_everything_cached(prefect_server: None, store: Store) -> None:
    first = record(store, ["questions"])
    state = run_flow(store, first.run_id)
    assert state.is_completed()

    parent = run_of(first.run_id)
    assert parent.name == f"{first.run_id} questions: grpo on seedling after sft"
    assert set(parent.tags) == {
        "run:demo", "preset:demo", "model:seedling", "algo:grpo", "warmstart:sft", "data:symbolic",
    }  # fmt: skip
    below = subflows(parent)
    assert flow_names(below) == ["model", "questions"]
    assert [run.state_name for run in below] == ["Completed", "Completed"]
    assert [run.name for run in below] == [
        first.nodes[name].key[:8] for name in ("model", "questions")
    ]
    assert arrows(parent) == {"model": set(), "questions": {"model"}}

    after = load_run(store, first.run_id)
    assert after.status is RunStatus.COMPLETED
    assert states(after) == {"model": "done", "questions": "done"}
    assert after.prefect_flow_run_id == str(parent.id)
    manifest = store.get("questions", first.nodes["questions"].key).manifest
    assert manifest.prefect["flow_run_id"] == str(below[1].id)

    shown = artifacts(below[1])
    page = shown["demo-questions"].data
    assert "**built**" in page and f"/v2/runs/flow-run/{below[0].id}?tab=Artifacts)" in page
    assert "## 20 to train, 6 to test" in page
    assert {"figure": "questions / train", "value": 20} in json.loads(
        shown["demo-questions-table"].data
    )
    assert shown["demo-questions-progress"].data == 100.0
    lineage = artifacts(parent)["demo-run"]
    assert lineage.description == "2 of 2 stages are there"
    assert "```mermaid" in lineage.data
    assert f'click n1 "/v2/runs/flow-run/{below[1].id}?tab=Artifacts"' in lineage.data

    second = record(store, ["questions"])
    assert run_flow(store, second.run_id).is_completed()
    again = run_of(second.run_id)
    assert [run.state_name for run in subflows(again)] == ["Cached", "Cached"]
    assert arrows(again) == {"model": set(), "questions": {"model"}}
    assert states(load_run(store, second.run_id)) == {"model": "reused", "questions": "reused"}
    page = artifacts(subflows(again)[1])["demo-questions"].data
    made_there = f"/v2/runs/flow-run/{below[1].id}?tab=Artifacts"
    assert f"**reused**: made by [run {first.run_id}]({made_there})" in page
    lineage = artifacts(again)["demo-run"].data
    assert f'click n1 "{made_there}"' in lineage and f"[{first.run_id}]({made_there})" in lineage


def test_links_lead_here_when_the_maker_is_not_in_prefect(
    prefect_server: None, store: Store
) -> None:
    first = record(store, ["questions"])
    run_flow(store, first.run_id)
    delete_flow_runs(run_of(first.run_id))
    second = record(store, ["questions"])
    assert run_flow(store, second.run_id).is_completed()
    again = run_of(second.run_id)
    below = subflows(again)
    page = artifacts(below[1])["demo-questions"].data
    assert f"**reused**: made by run {first.run_id}, " in page
    assert f"](/v2/runs/flow-run/{below[0].id}?tab=Artifacts)" in page
    lineage = artifacts(again)["demo-run"].data
    for index, run in enumerate(below):
        assert f'click n{index} "/v2/runs/flow-run/{run.id}?tab=Artifacts"' in lineage


def test_what_the_user_can_fix_fails_the_run_in_one_line(
    prefect_server: None, store: Store
) -> None:
    found = record(store, ["questions"], "questions.max_prompt_tokens=8")
    state = run_flow(store, found.run_id)
    assert state.is_failed() and state.result(raise_on_failure=False) is None
    assert state.message.startswith("questions: ")
    below = subflows(run_of(found.run_id))
    assert [run.state_name for run in below] == ["Completed", "Failed"]
    after = load_run(store, found.run_id)
    assert after.status is RunStatus.FAILED
    assert states(after) == {"model": "done", "questions": "failed"}
    assert after.nodes["questions"].message in state.message
    lineage = artifacts(run_of(found.run_id))["demo-run"]
    assert "**questions failed**" in lineage.data and ":::failed" in lineage.data
    assert lineage.description == "questions failed; 1 of 2 stages are there"
    page = artifacts(below[1])["demo-questions"].data
    assert f"**failed**: {after.nodes['questions'].message}" in page
    assert "questions.log`:\n\n`" in page


def test_a_fault_of_ours_fails_the_run_and_is_raised(prefect_server: None, store: Store) -> None:
    found = record(store, ["model"])
    logs = run_folder(store, found.run_id) / "logs"
    logs.rmdir()
    logs.write_text("a file in the folder's place")
    state = run_flow(store, found.run_id)
    assert state.is_failed()
    assert isinstance(state.result(raise_on_failure=False), FileExistsError)
    after = load_run(store, found.run_id)
    assert after.status is RunStatus.FAILED and states(after) == {"model": "failed"}


def test_forced_stage_runs_again_and_equal_content_is_reused_below(
    prefect_server: None, store: Store
) -> None:
    run_flow(store, record(store, ["questions"]).run_id)
    found = record(store, ["questions"], force=["model"])
    assert run_flow(store, found.run_id).is_completed()
    assert states(load_run(store, found.run_id)) == {"model": "done", "questions": "reused"}


def test_damaged_artifact_is_made_again(prefect_server: None, store: Store) -> None:
    first = record(store, ["questions"])
    run_flow(store, first.run_id)
    folder = store.get("questions", first.nodes["questions"].key).folder
    (folder / "questions.parquet").write_bytes(b"damaged")
    second = record(store, ["questions"])
    assert run_flow(store, second.run_id).is_completed()
    assert states(load_run(store, second.run_id)) == {"model": "reused", "questions": "done"}


def test_device_slot_is_held_one_at_a_time(prefect_server: None) -> None:
    from prefect.client.orchestration import get_client

    from flows.pages.publish import DEVICE_SLOT, create_device_limit, device_slot

    create_device_limit()
    create_device_limit()  # a limit that exists is kept

    def taken() -> int:
        with get_client(sync_client=True) as client:
            return client.read_global_concurrency_limit_by_name(DEVICE_SLOT).active_slots

    assert taken() == 0
    with device_slot():
        assert taken() == 1
    assert taken() == 0
