"""Only whole checkpoints are resumed from, whatever died when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tasks.training.resume import CheckpointKeeper, newest_checkpoint


def write(folder: Path, step: int) -> None:
    """What the trainer leaves, before the keeper is told."""
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "sub").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text("weights")
    (checkpoint / "sub" / "state.json").write_text("{}")


def told(folder: Path, step: int, keep: int = 2) -> None:
    CheckpointKeeper(keep).on_save(
        SimpleNamespace(output_dir=str(folder)),
        SimpleNamespace(global_step=step, log_history=[]),
        None,
    )


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "training") is None


def test_the_newest_is_newest_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        write(tmp_path, step)
        told(tmp_path, step)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-8").exists()  # two are kept
    assert (tmp_path / "checkpoint-9" / "sub" / "state.json").exists()


def test_one_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 5)
    told(tmp_path, 5)
    write(tmp_path, 10)  # killed before the keeper was told
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


def test_one_that_was_being_removed_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 5)
    told(tmp_path, 5)
    (tmp_path / "checkpoint-5" / "ratchet-complete").unlink()  # the first thing removal does
    assert newest_checkpoint(tmp_path) is None
