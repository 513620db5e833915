"""Write the report: one HTML file that holds everything, verdict first.

What it says is computed in `ratchet.report` from the artifacts of the run, each under its node's
name. A run without a warm start or a benchmark has a report without those parts. With wandb on, the
page, its plots and the comparison go there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.config.run import EvaluateConfig, WandbConfig
from ratchet.report.gather import Gathered, gather
from ratchet.report.render import charts, render
from ratchet.report.templates import standalone
from tasks.runtime.context import StageContext, StageResult
from tasks.training.wandb_run import wandb_run

if TYPE_CHECKING:
    from ratchet.report.figures import Chart

FILE = "report.html"
MAX_BYTES = 5_000_000


def run(ctx: StageContext, *, evaluate: EvaluateConfig, wandb: WandbConfig) -> StageResult:
    """Write `report.html` (self-contained, below 5 MB)."""
    data = gather(ctx.inputs, ctx.run_id)
    assert data.confidence == evaluate.confidence, "the comparison was made at another level"
    drawn = charts(data)
    page = render(data, drawn)
    size = len(page.encode())
    assert size < MAX_BYTES, f"the report has {size:,} bytes"
    (ctx.out_dir / FILE).write_text(page, encoding="utf-8")
    verdict = data.summary["verdict"]
    with wandb_run(ctx, "report", wandb, {"evaluate": evaluate.model_dump(mode="json")}) as place:
        if place is not None:
            log_to_wandb(data, drawn, page)
    return StageResult(
        summary={"verdict": verdict, "report": FILE, "num_bytes": size},
        markdown=f"**{verdict}**\n\nThe report is `{FILE}` in this artifact ({size:,} bytes).",
        wandb_run=place,
    )


def log_to_wandb(data: Gathered, drawn: dict[str, Chart | None], page: str) -> None:
    """Log page, plots and comparison into the present wandb run."""
    import wandb

    columns = list(data.compared[0])
    rows = [[row[name] for name in columns] for row in data.compared]
    wandb.log(
        {
            "report": wandb.Html(page, inject=False),
            "comparison": wandb.Table(columns=columns, data=rows),
        }
        | {
            f"plots/{name}": wandb.Html(_with_title(chart), inject=False)
            for name, chart in drawn.items()
            if chart is not None
        }
    )
    assert wandb.run is not None, "called inside a run"
    wandb.run.summary.update({"verdict": data.summary["verdict"]} | _headline_figures(data))


def _with_title(chart: Chart) -> str:
    """A plot as a page of its own: the finding, the picture, what is drawn."""
    from html import escape

    return (
        f"<!doctype html><meta charset='utf-8'><body style='font-family:sans-serif'>"
        f"<h3>{escape(chart.title)}</h3>{standalone(chart.svg)}<p>{escape(chart.caption)}</p>"
    )


def _headline_figures(data: Gathered) -> dict[str, float]:
    """Strict accuracies of all variants on whole benchmarks, as 'strict/<benchmark>/<variant>'."""
    return {
        f"strict/{row['benchmark']}/{row['variant']}": row["strict"]
        for row in data.summary["variants"]
        if (row["band"], row["decoding"]) == ("all", "greedy")
    }
