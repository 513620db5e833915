"""Write the report: one HTML file that holds everything, verdict first.

What it says is computed in `ratchet.report` from the artifacts of the run, each under its node's
name. A run without a warm start or a benchmark has a report without those parts.
"""

from __future__ import annotations

from ratchet.config import EvaluateConfig
from ratchet.report.gather import gather
from ratchet.report.render import render
from tasks.context import StageContext, StageResult

FILE = "report.html"
MAX_BYTES = 5_000_000


def run(ctx: StageContext, *, evaluate: EvaluateConfig) -> StageResult:
    """Write `report.html` (self-contained, below 5 MB)."""
    data = gather(ctx.inputs, ctx.run_id)
    assert data.confidence == evaluate.confidence, "the comparison was made at another level"
    page = render(data).encode()
    assert len(page) < MAX_BYTES, f"the report has {len(page):,} bytes"
    (ctx.out_dir / FILE).write_bytes(page)
    verdict = data.summary["verdict"]
    return StageResult(
        summary={"verdict": verdict, "report": FILE, "num_bytes": len(page)},
        markdown=f"**{verdict}**\n\nThe report is `{FILE}` in this artifact ({len(page):,} bytes).",
    )
