"""One Weights & Biases run per training stage: grouped by Ratchet run, one job type per stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ratchet.config.run import WandbConfig
from tasks.runtime.context import StageContext


def report_to(config: WandbConfig) -> list[str]:
    """The trainer's `report_to`."""
    return [] if config.mode == "disabled" else ["wandb"]


@contextmanager
def wandb_run(
    ctx: StageContext, stage: str, config: WandbConfig, settings: dict[str, Any]
) -> Iterator[str | None]:
    """A wandb run around training; yields where it can be found, None when wandb is off.

    The trainer's own callback logs into it. Offline runs lie in the run's folder of the store.
    A stage that fails marks its wandb run as failed.
    """
    if config.mode == "disabled":
        yield None
        return
    import wandb

    folder = ctx.store.root / "runs" / ctx.run_id
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=config.project,
        group=ctx.run_id,
        job_type=stage,
        name=ctx.node,
        mode=config.mode,
        dir=str(folder),
        config=settings,
        settings=wandb.Settings(console="off"),
    )
    place = run.url if config.mode == "online" else str(run.settings.sync_dir)
    try:
        yield place
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()
