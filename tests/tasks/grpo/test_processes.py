"""GRPO in two processes: what each does, what is written once, and the death of one of them."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.load import load_config
from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.errors import UserError
from ratchet.rollouts.training_log import TrainingLog
from ratchet.store.schemas import read_table
from tasks.grpo.launch import failure
from tasks.grpo.process import FAILURE, Failure, Task
from tasks.grpo.settings import Sections
from tasks.runtime.supervisor import descendants
from tasks.training.seeds import training_order
from tests.support.tiny_grpo import GROUP_SIZE, NUM_QUESTIONS, SEEDLING, context, letters, run_stage
from tests.tasks.training.test_dev_check import with_dev

DIE_AT = "the-second-process-dies-at"
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
calls = 0


def heard_from_outside() -> list[str]:
    """Sockets of this process and the launcher above it that listen on more than loopback."""
    links = [
        str(link.readlink())
        for pid in (os.getpid(), os.getppid())
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    ]
    found = []
    for table, loopback in (("tcp", "0100007F:"), ("tcp6", "0" * 24 + "01000000:")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            mine = f"socket:[{fields[9]}]" in links
            if mine and fields[3] == LISTENING and not fields[1].startswith(loopback):
                found.append(fields[1])
    return found


def letters_or_death(completions: list[str], **columns: Any) -> list[float]:
    """A reward in whose course, where a file in the stage's work folder says so, the second
    process is killed."""
    global calls
    calls += 1
    assert heard_from_outside() == []
    order = Path(DIE_AT)
    if order.exists() and os.environ["RANK"] == "1" and calls == int(order.read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(completions)


@pytest.mark.slow
def test_two_processes_share_every_step_and_outlive_no_death(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    ctx = replace(with_dev(tmp_path), emit=events.append)
    settings: dict[str, Any] = {
        "processes": 2,
        "save_every": 2,
        "max_completion_tokens": 16,
        "weights": {"tests.tasks.grpo.test_processes:letters_or_death": 1.0},
    }
    order = ctx.work_dir / DIE_AT
    order.write_text("4")
    before = set(descendants(os.getpid()))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"training process 1 of 2 was ended by signal 9 \(out"):
        run_stage(ctx, **settings)
    assert time.monotonic() - start < 240  # the first process doesn't wait for the second
    assert not set(descendants(os.getpid())) - before
    assert [event["done"] for event in events if event["event"] == "progress"] == [1, 2, 3]
    training_log = TrainingLog(ctx.work_dir / "steps")
    third = training_log.rollouts_of(3)

    order.unlink()
    events.clear()
    run_stage(ctx, **settings)
    assert [event["done"] for event in events if event["event"] == "progress"] == [3, 4]
    assert sum("continuing from checkpoint-2" in str(event) for event in events) == 1
    rollouts = read_table(ctx.out_dir / "rollouts.parquet", "rollouts").to_pylist()
    assert [row for row in rollouts if row["step"] == 3] == third  # as if nobody had died
    # One process would have asked the same questions in the same order, each row once.
    asked = [f"q{1 + i}" for i in training_order(NUM_QUESTIONS, 4 * 2, ctx.seed)]
    assert [row["question_id"] for row in rollouts[::GROUP_SIZE]] == asked
    assert [row["sample_index"] for row in rollouts] == 4 * 2 * list(range(GROUP_SIZE))
    halves = {tuple(row["completion"] for row in rollouts[i : i + 4]) for i in range(0, 32, 4)}
    assert len(halves) == 8  # each process draws its own
    metrics = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    for row in metrics:
        mine = [one for one in rollouts if one["step"] == row["step"]]
        assert row["sampled_tokens"] == sum(one["num_tokens"] for one in mine)
        assert row["reward"] == pytest.approx(sum(one["reward"] for one in mine) / len(mine))
        assert (row["dev_strict"] is None) == (row["step"] % 2 == 1)
    states = sorted(path.name for path in ctx.work_dir.glob("training/checkpoint-4/rng_state*"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]
    assert (ctx.out_dir / "checkpoint" / "model.safetensors").is_file()


def test_what_the_processes_are_told_is_json_and_arrives_whole(tmp_path: Path) -> None:
    ctx = context(tmp_path, SEEDLING)
    sections = Sections(
        ModelConfig(max_model_len=512),
        PromptConfig(),
        SamplerConfig(),
        RewardsConfig(weights={"tests.support.tiny_grpo:letters": 0.1}),
        GrpoConfig(processes=2, vllm_server_device="1", learning_rate=3e-7),
        GuardConfig(),
        WandbConfig(),
    )
    text = Task.of(ctx, sections).model_dump_json()
    assert set(json.loads(text)["inputs"]["questions"]) == {"folder", "manifest"}
    task = Task.model_validate_json(text)
    assert task.sections == sections
    found = task.context(ctx.emit)
    assert found.store.root == ctx.store.root
    assert replace(found, store=ctx.store) == ctx
    table = found.inputs["questions"].table("questions")
    assert table.num_rows == NUM_QUESTIONS + 1


def test_a_mistake_is_told_before_a_kill_and_a_kill_before_a_lost_connection(
    tmp_path: Path,
) -> None:
    def leave(rank: int, is_users: bool, message: str, at: float) -> None:
        found = {"rank": rank, "is_users": is_users, "message": message, "time": at}
        (tmp_path / FAILURE.format(rank)).write_text(json.dumps(found))

    said = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n"
    said += "  exitcode  : -9 (pid: 7)\n"
    assert "ended before they were done" in str(failure(tmp_path, 2, ""))
    leave(0, False, "Connection closed by peer", 2.0)
    assert "process 1 of 2 was ended by signal 9 (out of memory?)" in str(
        failure(tmp_path, 2, said)
    )
    assert "process 0 of 2 failed: Connection closed" in str(failure(tmp_path, 2, ""))
    leave(1, False, "division by zero", 1.0)
    assert "process 1 of 2 failed: division by zero" in str(failure(tmp_path, 2, said))
    leave(1, True, "reward 'a' returned nan", 1.0)
    told = failure(tmp_path, 2, said)
    assert isinstance(told, UserError)
    assert str(told) == "reward 'a' returned nan"
    assert Failure.read(tmp_path / FAILURE.format(1)).rank == 1


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["grpo.processes=3"], "processes=3 must divide prompts_per_step=8"),
        (["grpo.processes=2"], "micro_batch_size=64 must divide prompts_per_step × group_size / "),
        (["grpo.processes=2", "grpo.algorithm=dapo"], "refill_rounds=4 needs processes=1"),
    ],
)
def test_what_cannot_be_shared_is_refused(assignments: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("demo", assignments)
    assert words in str(caught.value)
