"""`ratchet audit-sync`: from a preset or a run to an audit of its weight sync, and the result.

The audit is the run's own `audit` node. Where the model that GRPO starts from isn't there yet, the
start model is audited in its place: a sync that carries one carries the other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ratchet.diagnostics.audit_rows import worst_rows
from ratchet.errors import UserError
from ratchet.pipeline import request as cli_plan

if TYPE_CHECKING:
    from ratchet.config.run import RunConfig
    from ratchet.store.runs import RunRecord
    from ratchet.store.store import Store

AUDIT = "audit"
"""The node, and what the name of such a run ends with."""
START_MODEL = ['warmstart.method="none"', "presample.after_warmstart=false"]
"""Settings under which GRPO starts from the start model."""


class Mode(StrEnum):
    """How weights reach the sampler."""

    ADAPTER = "adapter"
    MERGED = "merged"


def prepare_audit(
    request: cli_plan.Request, mode: Mode | None, *, server: bool, force: bool, command: str
) -> RunRecord:
    """Check an audit and write the record of its run. UserError where there is nothing to audit."""
    store = cli_plan.open_store(request.store)
    wanted = ["audit.preflight=true"]
    wanted += [] if mode is None else [f'audit.sync="{mode}"']
    wanted += ['audit.vllm_mode="server"'] if server else []
    config, previous = cli_plan.resolve(_with(request, wanted), store)
    if config.sampler.engine != "vllm":
        raise UserError(
            "the trainer's own weights do the sampling (sampler.engine = 'transformers'), so there "
            "is no sync to audit: set sampler.engine = 'vllm'"
        )
    if mode is Mode.ADAPTER and not config.grpo.lora.enabled:
        raise UserError("--mode adapter needs an adapter: set grpo.lora.enabled = true")
    if not _policy_is_there(config, store):
        config, previous = cli_plan.resolve(_with(request, wanted + START_MODEL), store)
    return cli_plan.record_measurement(config, previous, store, AUDIT, force, command)


def _with(request: cli_plan.Request, further: list[str]) -> cli_plan.Request:
    from dataclasses import replace

    return replace(request, assignments=[*request.assignments, *further])


def _policy_is_there(config: RunConfig, store: Store) -> bool:
    """Whether everything above the audit is there, the model that GRPO starts from included."""
    from ratchet.pipeline.dag import ancestors
    from ratchet.pipeline.plan import make_plan

    above = ancestors(config, AUDIT)
    return all(
        planned.state == "reuse"
        for planned in make_plan(config, store).nodes
        if planned.node.name in above
    )


def show_audit(request: cli_plan.Request, record: RunRecord) -> None:
    """Print what the audit found, if it got as far as an artifact."""
    from ratchet.store.store import Store

    store = Store(request.store.absolute())
    found = store.find(AUDIT, record.nodes[AUDIT].key)
    if found is None:
        return
    parent = found.manifest.parents["model"]
    _print(found.manifest.summary, found.table(AUDIT).to_pylist(), f"{parent.stage}/{parent.key}")


def _print(summary: dict[str, Any], rows: list[dict[str, Any]], model: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("probe", "check", "of", "worst", "limit", ""):
        table.add_column(heading, justify="right" if heading in ("worst", "limit") else "left")
    for row in worst_rows(rows):
        told = row["limit"] > 0 or row["value"] > 0
        table.add_row(
            row["probe"],
            row["check"],
            f"{row['group']} ({row['count']})" if row["count"] > 1 else row["group"],
            f"{row['value']:.1e}" if told else "",
            f"{row['limit']:.0e}" if told else "",
            "[green]ok[/]" if row["ok"] else "[red]wrong[/]",
        )
    console = Console()
    console.print(table)
    verdict = (
        f"[green]Passed[/]: {summary['num_syncs']} syncs"
        if summary["passed"]
        else f"[red]Failed[/] at sync {summary['found_at_sync']}, seen by {summary['probe']}: "
        f"{summary['cause']}"
    )
    console.print(f"\n{verdict} ({summary['sync']}, {summary['mode']}; model {escape(model)}).")
    console.print(escape(summary["diagnosis"]))
    if summary["read_back"] is not None:
        console.print(f"[dim]Read back out of the engine: {escape(summary['read_back'])}.[/]")
