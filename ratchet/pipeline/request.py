"""From a request on the command line to a plan and a run record."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import UserError

if TYPE_CHECKING:
    from ratchet.config.run import RunConfig
    from ratchet.pipeline.plan import Plan, PlannedNode
    from ratchet.store.runs import RunRecord
    from ratchet.store.store import Artifact, Store


@dataclass(frozen=True)
class Request:
    """What was asked for: a preset or an earlier run, and what to change."""

    preset: str | None
    from_run: str | None
    assignments: list[str]
    name: str | None
    data: Path | None
    store: Path


def open_store(path: Path) -> Store:
    """The store in a folder that may not be there yet."""
    from ratchet.store.store import Store

    if path.exists() and not path.is_dir():
        raise UserError(f"--store {path} is a file: name a folder")
    return Store(path.absolute())


def resolve(request: Request, store: Store) -> tuple[RunConfig, RunRecord | None]:
    """The configuration asked for, and the run it is compared with when reasons are told."""
    from ratchet.config.load import from_record, load_config
    from ratchet.store.lineage import find_run
    from ratchet.store.runs import all_runs

    assignments = list(request.assignments)
    if request.name is not None:
        assignments.append(f"name={json.dumps(request.name)}")
    if (request.preset is None) == (request.from_run is None):
        raise UserError("name either a preset (--preset demo) or an earlier run (--run latest)")
    if request.preset is None:
        assert request.from_run is not None
        previous = find_run(store, request.from_run)
        config = from_record(previous.config, assignments, request.data)
        return _checked(config, store), previous
    config = _checked(load_config(request.preset, assignments, request.data), store)
    earlier = (run for run in all_runs(store) if run.name == config.name)
    return config, next(earlier, None)


def _checked(config: RunConfig, store: Store) -> RunConfig:
    """The configuration with `rollouts.path` resolved in the store; UserError when what it names or
    the model can't be used."""
    from ratchet.pipeline.dag import logged_by
    from ratchet.rollouts.files import resolve as resolve_rollouts
    from ratchet.rollouts.rows import open_source

    _check_model(config)
    path = config.rollouts.path
    if path is None:
        return config
    named = config.rollouts.model_copy(update={"path": resolve_rollouts(store, path)})
    if not logged_by(named):
        assert named.path is not None
        open_source(Path(named.path), named)
    return config.model_copy(update={"rollouts": named})


def _check_model(config: RunConfig) -> None:
    """UserError when the model can't be used, or the longest prompt and completion allowed don't
    fit its context."""
    from ratchet.models.check import check_model, context_limit

    check_model(config.model)
    for arm in config.evaluate.arms:
        other = {"path": arm.path, "revision": arm.revision}
        try:
            check_model(config.model.model_copy(update=other))
        except UserError as error:
            raise UserError(f"evaluate.arms '{arm.name}': {error}") from None
    if config.warmstart.method == "opd":
        _check_teacher(config)
    limit = context_limit(config.model)
    prompt, completion = config.questions.max_prompt_tokens, config.sampler.max_completion_tokens
    if limit is not None and prompt + completion > limit:
        raise UserError(
            f"questions.max_prompt_tokens + sampler.max_completion_tokens = {prompt} + "
            f"{completion} exceeds the model's context of {limit} tokens: lower one of them"
        )


def _check_teacher(config: RunConfig) -> None:
    """UserError when the teacher's local files can't be used."""
    from ratchet.models.check import Kind, check_model, kind_of

    teacher = {"path": config.opd.teacher, "revision": config.opd.teacher_revision}
    try:
        check_model(config.model.model_copy(update=teacher))
    except UserError as error:
        raise UserError(f"opd.teacher: {str(error).removeprefix('model.path: ')}") from None
    assert config.opd.teacher is not None, "the configuration demands one"
    if kind_of(config.opd.teacher) is Kind.PACKAGED:
        raise UserError(
            f"opd.teacher = '{config.opd.teacher}': give the folder of a checkpoint or a hub id"
        )


def new_record(
    config: RunConfig, plan: Plan, targets: list[str], force: list[str], command: str
) -> RunRecord:
    """The record of a run of `plan`, of all its nodes where `targets` is empty."""
    from ratchet.store.runs import NodeRecord, RunRecord, new_run_id, now

    return RunRecord(
        run_id=new_run_id(config.name),
        name=config.name,
        created_at=now(),
        config=config.model_dump(mode="json"),
        command=command,
        targets=targets or [planned.node.name for planned in plan.nodes],
        force=force,
        nodes={
            planned.node.name: NodeRecord(stage=planned.node.stage, key=planned.key)
            for planned in plan.nodes
        },
    )


def record_measurement(
    config: RunConfig,
    previous: RunRecord | None,
    store: Store,
    node: str,
    force: bool,
    command: str,
) -> RunRecord:
    """Make and return the record of a run that only measures: `node` and what it needs. Its name
    says so: it is no run of the pipeline, and not to be taken for one."""
    from ratchet.pipeline.plan import make_plan
    from ratchet.store.runs import create_run

    if not config.name.endswith(f"-{node}"):
        config = config.model_copy(update={"name": f"{config.name}-{node}"})
    forced = [node] if force else []
    plan = make_plan(config, store, force=frozenset(forced), previous=previous)
    record = new_record(config, plan, [node], forced, command)
    record = record.model_copy(update={"based_on": None if previous is None else previous.run_id})
    create_run(store, record)
    return record


def _based_on(previous: RunRecord, record: RunRecord) -> RunRecord:
    """The record of a run whose settings start from an earlier run's."""
    return record.model_copy(update={"based_on": previous.run_id, "preset": previous.preset})


def prepare(request: Request, targets: list[str], force: list[str], command: str) -> RunRecord:
    """Check a whole run and write its record."""
    from ratchet.config.load import preset_path
    from ratchet.pipeline.dag import nodes_named
    from ratchet.pipeline.plan import make_plan
    from ratchet.store.runs import create_run

    store = open_store(request.store)
    config, previous = resolve(request, store)
    names = [node.name for name in force for node in nodes_named(config, name)]
    plan = make_plan(config, store, force=frozenset(names), previous=previous)
    record = new_record(config, plan, targets, names, command)
    if request.preset is not None:
        record = record.model_copy(update={"preset": preset_path(request.preset).stem})
    else:
        assert previous is not None
        record = _based_on(previous, record)
    create_run(store, record)
    return record


def prepare_stage(
    request: Request, stage_name: str, force: bool, downstream: bool, command: str
) -> RunRecord:
    """Check the rerun of one stage (of one node, if it is named so) and write its record."""
    from ratchet.pipeline.dag import ancestors, descendants, nodes_named
    from ratchet.pipeline.plan import make_plan
    from ratchet.store.runs import create_run

    store = open_store(request.store)
    config, previous = resolve(request, store)
    assert previous is not None
    wanted = {node.name for node in nodes_named(config, stage_name)}
    plan = make_plan(
        config, store, force=frozenset(wanted) if force else frozenset(), previous=previous
    )
    above = set().union(*(ancestors(config, name, read=True) for name in wanted)) - wanted
    first = next(
        (node for node in plan.nodes if node.node.name in above and node.state == "run"), None
    )
    if first is not None:
        raise UserError(_what_is_missing(request, config, previous, stage_name, first))
    below = set().union(*(descendants(config, name) for name in wanted)) if downstream else set()
    names = [planned.node.name for planned in plan.nodes]
    targets = [name for name in names if name in wanted | below]
    forced = [name for name in names if name in wanted] if force else []
    record = new_record(config, plan, targets, forced, command)
    record = _with_stale(store, plan, previous, _based_on(previous, record), wanted | above)
    create_run(store, record)
    return record


def _with_stale(
    store: Store, plan: Plan, previous: RunRecord, record: RunRecord, kept: set[str]
) -> RunRecord:
    """The record with those nodes marked stale that the earlier run had made, that this one would
    have to make anew and wasn't asked for."""
    from ratchet.store.runs import NodeState

    for planned in plan.nodes:
        name = planned.node.name
        old = previous.nodes.get(name)
        if name in kept or name in record.targets or planned.state == "reuse" or old is None:
            continue
        if store.find(old.stage, old.key) is not None:
            record = record.with_node(name, state=NodeState.STALE)
    return record


def _what_is_missing(
    request: Request, config: RunConfig, previous: RunRecord, stage_name: str, first: PlannedNode
) -> str:
    """What to say when a stage's rerun would have to run something above it first."""
    from ratchet.config.load import from_record
    from ratchet.pipeline.plan import changes

    name = first.node.name
    changed = changes(
        from_record(previous.config, [], request.data).model_dump(mode="json"),
        config.model_dump(mode="json"),
    )
    cause = f" ({'; '.join(changed)})" if changed else ""
    options = f"--run {previous.run_id}" + "".join(
        f" --set {shlex.quote(assignment)}" for assignment in request.assignments
    )
    return (
        f"'{stage_name}' needs '{name}', which would have to run first: {first.why}{cause}. Use "
        f"`ratchet stage {name} --downstream {options}` or `ratchet run {options}`"
    )


def _last_seconds(store: Store) -> dict[str, float]:
    """How long each stage took when it was last made here."""
    found: dict[str, float] = {}
    for artifact in store.artifacts():
        found.setdefault(artifact.manifest.stage, artifact.manifest.duration_seconds)
    return found


def show(request: Request, as_json: bool) -> None:
    """Print the plan."""
    from flows.cli.resources import memory_as_json, show_resources
    from ratchet.evaluation.power import num_train
    from ratchet.pipeline.plan import make_plan

    store = open_store(request.store)
    config, previous = resolve(request, store)
    plan = make_plan(config, store, previous=previous)
    running = {planned.node.stage for planned in plan.nodes if planned.state == "run"}
    seconds = _last_seconds(store)
    rows = [
        {
            "node": planned.node.name,
            "stage": planned.node.stage,
            "state": planned.state,
            "why": planned.why,
            "key": planned.key,
            "inputs": planned.node.inputs,
            "last_seconds": seconds.get(planned.node.stage),
        }
        for planned in plan.nodes
    ]
    if as_json:
        memory = memory_as_json(config, store, running)
        rows = [row | {"memory": memory.get(str(row["stage"]))} for row in rows]
        print(json.dumps(rows, indent=2))
        return
    _print_plan(config, rows)
    loaded, clean = (
        store.find(name, plan.named(name).key) for name in ("questions", "decontaminate")
    )
    show_resources(config, store, running, num_train(config, clean or loaded))
    _print_foresight(config, loaded)


def _print_foresight(config: RunConfig, questions: Artifact | None) -> None:
    """What the comparison will be able to see, from the questions themselves if they are there."""
    from ratchet.evaluation.power import counts_in, expected_counts, foresight

    counts = expected_counts(config) if questions is None else counts_in(questions)
    lines = foresight(counts, config.evaluate.confidence)
    if lines:
        print("\nThe comparison at the end finds a true difference, 4 times in 5, from")
        print("\n".join(f"  {line}" for line in lines))


def _few(names: list[str], what: str) -> str:
    """The names where they are few, else their number."""
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} {what}"


def _print_plan(config: RunConfig, rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ratchet.pipeline.dag import STAGES

    table = Table(title=f"Plan for '{config.name}'", title_justify="left", box=None, pad_edge=False)
    for heading in ("stage", "", "from", "why it runs, or what it does", "last"):
        table.add_column(
            heading,
            no_wrap=heading not in ("from", "why it runs, or what it does"),
        )
    for row in rows:
        reuse = row["state"] == "reuse"
        inputs = list(row["inputs"].values())
        last = row["last_seconds"]
        table.add_row(
            row["node"],
            "[green]reuse[/]" if reuse else "[yellow]run[/]",
            _few(inputs, "stages"),
            row["why"] or f"[dim]{STAGES[row['stage']].gist}[/]",
            "" if last is None else f"{last:.0f} s",
        )
    console = Console()
    console.print(table)
    num_run = sum(row["state"] == "run" for row in rows)
    console.print(
        f"\n{num_run} of {len(rows)} stages would run, {len(rows) - num_run} are reused. "
        "Nothing was started."
    )
