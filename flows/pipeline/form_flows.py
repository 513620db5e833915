"""Flows that are started from a form: the full pipeline, and each stage of an earlier run.

They write the run record just as `ratchet run` and `ratchet stage` do (the same code), then carry
it out. Bad input ends the flow run as Failed with one line. *Retry* on a flow run continues its
own run record: what is done is reused.

Launch: `ratchet ui` serves them as deployments (`flows.deployment.serve`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from prefect import Flow, flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.pipeline import forms
from flows.pipeline.flow import carry_out
from ratchet.errors import UserError
from ratchet.pipeline.dag import STAGES
from ratchet.pipeline.request import prepare, prepare_stage
from ratchet.store.runs import RunRecord, all_runs
from ratchet.store.store import Store

DEFAULT_STORE = "artifacts"


def _own_record(store: Path) -> RunRecord | None:
    """The run record that this flow run wrote when it was tried before."""
    found = (run for run in all_runs(Store(store)) if run.prefect_flow_run_id == flow_run.id)
    return next(found, None)


def _record_and_carry_out(store: str, prepare_run: Callable[[], RunRecord]) -> State[Any]:
    """Write the run record, or find it again, and carry it out."""
    folder = Path(store).absolute()
    record = _own_record(folder)
    if record is None:
        try:
            record = prepare_run()
        except UserError as error:
            return Failed(message=str(error))
    return carry_out(str(folder), record.run_id)


@flow(name="full", persist_result=False)
def pipeline(
    preset: forms.Preset = forms.DEMO,
    start_from: str | None = None,
    name: str | None = None,
    seed: int | None = None,
    model: str | None = None,
    warmstart: Literal["none", "sft", "opd"] | None = None,
    presample_k: int | None = None,
    grpo_steps: int | None = None,
    grpo_learning_rate: float | None = None,
    settings: str = "",
    force: tuple[forms.StageName, ...] = (),
    store: str = DEFAULT_STORE,
) -> State[Any]:
    """The whole pipeline, from questions to the report. What exists already is reused.

    Args:
        preset: Where the settings start from.
        start_from: Start from an earlier run's settings instead: its id, its name, or 'latest'.
        name: Name of the run (lower case, digits, dot, dash); the preset's when left empty.
        seed: Seed of sampling, shuffling and training; the preset's when left empty.
        model: Hub id, local folder or packaged model; the preset's when left empty.
        warmstart: What happens before RL; the preset's choice when left empty.
        presample_k: Completions sampled per training question; the preset's when left empty.
        grpo_steps: Optimizer steps of GRPO; the preset's when left empty.
        grpo_learning_rate: Learning rate of GRPO; the preset's when left empty.
        settings: Any other settings, FIELD=VALUE, one a line, such as filter.keep_below=0.9.
        force: Stages made anew although they exist.
        store: Folder of the store on the machine that runs this.
    """
    request, command = forms.full_request(
        store,
        preset.value,
        start_from,
        settings,
        name=name,
        seed=seed,
        model__path=model,
        warmstart__method=warmstart,
        presample__k=presample_k,
        grpo__steps=grpo_steps,
        grpo__learning_rate=grpo_learning_rate,
    )
    forced = [stage.value for stage in force]
    return _record_and_carry_out(store, lambda: prepare(request, [], forced, command))


def _stage_flow(stage: str) -> Flow[..., Any]:
    """The flow that runs one stage of an earlier run again."""

    def rerun(
        run: str = "latest",
        change: forms.Change | None = None,
        settings: str = "",
        downstream: bool = False,
        force: bool = False,
        store: str = DEFAULT_STORE,
    ) -> State[Any]:
        request, command = forms.stage_request(store, stage, run, change, settings)
        return _record_and_carry_out(
            store, lambda: prepare_stage(request, stage, force, downstream, command)
        )

    form = forms.change_model(stage)
    fields = dict(inspect.signature(rerun, eval_str=True).parameters)
    if form is None:
        del fields["change"]
    else:
        fields["change"] = fields["change"].replace(annotation=form, default=form())
    rerun.__signature__ = inspect.Signature(list(fields.values()))  # type: ignore[attr-defined]
    rerun.__name__ = stage
    rerun.__doc__ = f"""One stage of an earlier run again: {STAGES[stage].gist}.

    What lies above it is reused; what lies below it is stale afterwards, unless it runs too.

    Args:
        run: The run: its id, its name, 'latest', or the key of an artifact that it made.
        change: Settings of this stage; what is left empty stays as it is in that run.
        settings: Any other settings, FIELD=VALUE, one a line, such as prompt.format=boxed.
        downstream: Then run everything that depends on it.
        force: Make it anew even if nothing has changed.
        store: Folder of the store on the machine that runs this.
    """
    return flow(name="audit" if stage == "audit" else "stage", persist_result=False)(rerun)


STAGE_FLOWS = {stage: _stage_flow(stage) for stage in STAGES}
# Prefect finds a served flow by module and attribute.
globals().update(STAGE_FLOWS)
