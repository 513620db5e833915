"""The gate before training: go on only where enough groups of RL are expected to be live.

The figures and the recommendation are the filter's, which has them in its artifact whether there is
a gate or not. The gate is a stage of its own so that another level selects nothing anew and a level
that isn't reached stops the run also where the selection is reused. What it refuses stays refused
until `headroom.min_live_share` or the selection changes.
"""

from __future__ import annotations

import json

from ratchet.config.run import HeadroomConfig
from tasks.runtime.context import StageContext, StageResult


def run(ctx: StageContext, *, headroom: HeadroomConfig) -> StageResult:
    """Write `headroom.json`: the share, the recommendation, and the refusal if there is one."""
    found = ctx.inputs["selection"].manifest.summary
    share, advice = found["rl_live_share"], found["recommendation"]
    group_size = found["headroom"]["group_size"]
    counted = f"{share:.1%} of the RL groups of {group_size} are expected to be live"
    reasons = "; ".join(advice["reasons"])
    summary = {
        "rl_live_share": share,
        "min_live_share": headroom.min_live_share,
        "recommendation": advice,
    }
    markdown = (
        f"**Passed**: {counted}, headroom.min_live_share is {headroom.min_live_share:g}.\n\n"
        f"Recommendation: **{advice['action']}**: {reasons}."
    )
    if share < headroom.min_live_share:
        summary["refused"] = (
            f"{counted}, below headroom.min_live_share={headroom.min_live_share:g}; "
            f"recommendation: {advice['action']} ({reasons}). Otherwise raise grpo.group_size, "
            "narrow filter.keep_above / filter.keep_below, or lower headroom.min_live_share"
        )
        markdown = f"**Stopped**: {summary['refused']}."
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    (ctx.out_dir / "headroom.json").write_text(text, encoding="utf-8")
    return StageResult(summary=summary, markdown=markdown)
