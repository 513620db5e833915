"""The end of a GRPO run: the policy and the tables are written, and what came out is summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ratchet.config.run import GrpoConfig
from tasks.grpo.settings import Sections, attention
from tasks.grpo.train import Trained
from tasks.grpo.trainer import RolloutTrainer
from tasks.runtime.context import StageContext, StageResult
from tasks.training.dev_check import describe_chosen, dev_summary
from tasks.training.policy import best_policy, save_policy

NUM_FIXED_TEXTS = 8
"""Completions compared before saving and after loading."""
EDGE_SHARE = 0.1
"""Share of the steps that 'first' and 'last' figures average."""


def finish(ctx: StageContext, sections: Sections, trained: Trained) -> StageResult:
    """Write what training made; called in the first process that trained."""
    trainer, training_log, dtype = trained.trainer, trained.training_log, sections.model.dtype
    rows, rollouts = training_log.metrics(), training_log.rollouts()
    last = training_log.rollouts_of(rollouts.column("step")[-1].as_py())[:NUM_FIXED_TEXTS]
    check = save_policy(
        best_policy(trainer, rows, ctx.log),
        trained.tokenizer,
        ctx.out_dir,
        [row["prompt"] + row["completion"] for row in last],
        dtype=dtype,
        attention=attention(dtype),
    )
    ctx.write_table("metrics", rows)
    ctx.write_table("rollouts", rollouts)
    num_tokens = sum(rollouts.column("num_tokens").to_pylist())
    summary = {
        "num_questions": trained.num_questions,
        "engine": sections.sampler.engine,
        **summarise(rows, num_tokens),
        **check.summary(),
        "drift_warnings": trainer.drift_guard.guard.num_warnings,
    }
    return StageResult(
        summary=summary,
        markdown=markdown(summary),
        sampled_tokens=num_tokens,
        device_seconds=summary["train_seconds"] * num_devices(sections.grpo, trainer),
        wandb_run=trained.wandb_place,
    )


def num_devices(grpo: GrpoConfig, trainer: RolloutTrainer) -> int:
    """Devices that training keeps: a GPU for each process and for a server on one of its own;
    processes on a CPU share it."""
    if trainer.accelerator.device.type != "cuda":
        return 1
    apart = trainer.use_vllm and grpo.vllm_mode == "server" and grpo.vllm_server_device is not None
    return trainer.accelerator.num_processes + apart


def edge_means(rows: Sequence[dict[str, Any]], name: str) -> tuple[float | None, float | None]:
    """Mean of a figure over the first and over the last tenth of the steps (one step at least);
    None where it was never logged."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return None, None
    count = max(1, math.ceil(len(values) * EDGE_SHARE))
    return sum(values[:count]) / count, sum(values[-count:]) / count


def mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean of a figure over the steps that logged it, None where none did."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def largest(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Largest value of a figure over the steps, None where none logged it."""
    return max((row[name] for row in rows if row.get(name) is not None), default=None)


def summarise(rows: Sequence[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """A stage summary from the rows of its `metrics` table."""
    summary: dict[str, Any] = {"num_steps": len(rows), "sampled_tokens": num_tokens}
    for name in ("reward", "strict", "lenient", "live_share", "truncated_share", "mean_tokens"):
        first, last = edge_means(rows, name)
        summary |= {f"{name}_first": first, f"{name}_last": last}
    summary |= dev_summary(rows)
    return summary | {
        "live_share_mean": mean(rows, "live_share"),
        "live_token_share": mean(rows, "live_token_share"),
        "drift_mean": mean(rows, "drift_mean"),
        "drift_max": largest(rows, "drift_max"),
        "dropped_share": mean(rows, "dropped_share"),
        "train_seconds": sum(row["step_seconds"] for row in rows),
        "generate_seconds": sum(row.get("generate_seconds") or 0.0 for row in rows),
        "sync_seconds": sum(row.get("sync_seconds") or 0.0 for row in rows),
    }


def markdown(summary: dict[str, Any]) -> str:
    """The summary for people."""

    def line(label: str, name: str) -> str:
        first, last = summary[f"{name}_first"], summary[f"{name}_last"]
        return f"| {label} | {_number(first)} | {_number(last)} |"

    drift = (
        "The trainer's own weights did the sampling: there is no drift."
        if summary["drift_mean"] is None
        else f"Drift between sampler and trainer: {summary['drift_mean']:.1e} nats per token on "
        f"average, {summary['drift_max']:.1e} at most; {summary['dropped_share']:.1%} of the "
        "completions dropped for it."
    )
    return "\n".join(
        (
            f"{summary['num_steps']} steps, {summary['sampled_tokens']:,} tokens sampled in "
            f"{summary['train_seconds']:.0f} s; {summary['live_share_mean']:.0%} of the groups "
            "were live.",
            "",
            "| mean over | first tenth of the steps | last tenth |",
            "|---|---|---|",
            line("reward", "reward"),
            line("strict accuracy", "strict"),
            line("lenient accuracy", "lenient"),
            line("truncated", "truncated_share"),
            line("tokens per completion", "mean_tokens"),
            "",
            describe_chosen(summary),
            "",
            drift,
            f"The reloaded checkpoint differs from the trained policy by "
            f"{summary['reload_mean_difference']:.1e} nats per token.",
        )
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
