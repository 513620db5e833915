"""What `ratchet plan` says about memory and time of the stages that would run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratchet.config.run import RunConfig
    from ratchet.models.shape import ModelShape
    from ratchet.resources.memory_check import Verdict
    from ratchet.store.store import Store

TRAINING = {"warmstart_sft": "sft", "warmstart_opd": "opd", "grpo": "grpo"}
"""The section that sets a stage's training."""


def _shape(path: str, revision: str | None, store: Store) -> ModelShape | None:
    """Sizes of a model that lies on this machine, or in the store since it was converted."""
    from ratchet.models.shape import model_folder, shape_of

    folder = model_folder(path, revision)
    if folder is None:
        for artifact in store.artifacts():
            made = artifact.manifest.config.get("model", {})
            kept = artifact.folder / "checkpoint"
            if artifact.manifest.stage == "model" and made.get("path") == path and kept.is_dir():
                folder = kept
    return None if folder is None else shape_of(folder)


def memory_verdicts(
    config: RunConfig, store: Store, stages: set[str]
) -> tuple[list[Verdict], str | None]:
    """A verdict for each training stage among `stages` that can be judged, and why others can't."""
    from ratchet.resources.device import find_device
    from ratchet.resources.memory import Sampling
    from ratchet.resources.memory_check import Wanted, judge

    device = find_device()
    if device is None:
        return [], "memory: unknown, this machine doesn't say how much it has"
    shape = _shape(config.model.path, config.model.revision, store)
    if shape is None:
        return [], f"memory: unknown until {config.model.path} is on this machine"
    teacher, unknown = None, None
    if config.opd.teacher is not None and "warmstart_opd" in stages:
        teacher = _shape(config.opd.teacher, config.opd.teacher_revision, store)
        if teacher is None:
            unknown = f"Memory of opd: unknown until {config.opd.teacher} is on this machine"
            stages = stages - {"warmstart_opd"}
    completion = config.sampler.max_completion_tokens
    found = [
        judge(
            Wanted(
                name=name,
                section=getattr(config, name),
                dtype=config.model.dtype,
                longest=config.sft.max_length if name == "sft" else completion,
                prompt_tokens=config.questions.max_prompt_tokens,
                sampling=Sampling(config.sampler.engine, config.sampler.max_num_seqs),
                shape=shape,
                device=device,
                teacher=teacher,
                dev_tokens=completion if config.questions.dev else 0,
            ),
            device.total,
        )
        for stage, name in TRAINING.items()
        if stage in stages
    ]
    return found, unknown


def memory_as_json(config: RunConfig, store: Store, stages: set[str]) -> dict[str, Any]:
    """By stage: bytes at least and at most, what there is, and the verdict; nothing where it is
    unknown."""
    verdicts, _ = memory_verdicts(config, store, stages)
    stage_of = {name: stage for stage, name in TRAINING.items()}
    return {
        stage_of[found.wanted.name]: {
            "low_bytes": found.low.total,
            "high_bytes": found.high.total,
            "device_bytes": found.capacity,
            "fit": found.fit.value,
            "parts": {part.what: part.num_bytes for part in found.high.parts},
            "advice": list(found.advice),
        }
        for found in verdicts
    }


def show_resources(
    config: RunConfig, store: Store, stages: set[str], num_questions: int | None
) -> None:
    """Print memory by part and time of the stages that would run; nothing where none trains.
    `num_questions` are there to presample."""
    from rich.console import Console
    from rich.table import Table

    from ratchet.resources.memory_check import Fit
    from ratchet.resources.pace import pace

    console = Console()
    verdicts, unknown = memory_verdicts(config, store, stages)
    if unknown is not None:
        console.print(f"\n{unknown}")
    for found in verdicts:
        low = {part.what: part.num_bytes for part in found.low.parts}
        title = (
            f"\nMemory of {found.wanted.name}: {found.low.total / 1e9:.1f} to "
            f"{found.high.total / 1e9:.1f} GB of {found.capacity / 1e9:.1f} GB "
            f"({found.wanted.device.name}): {found.fit}"
        )
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("what")
        table.add_column("GB", justify="right", no_wrap=True)
        table.add_column("")
        for part in found.high.parts:
            least, most = low[part.what] / 1e9, part.num_bytes / 1e9
            size = (
                f"{most:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
            )
            table.add_row(part.what, size, f"[dim]{part.why}[/]")
        console.print(table)
        if found.fit is not Fit.SURELY:
            console.print(f"What fits: {' or '.join(found.advice) or 'no single setting'}")
    lines = list(pace(config, store, stages, num_questions))
    if lines:
        console.print("\nTime")
        for line in lines:
            console.print(f"  {line}")
