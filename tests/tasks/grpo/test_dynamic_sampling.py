"""Dynamic sampling: dead groups are replaced, within a budget, and nothing is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.config.load import build_config, load_config
from ratchet.errors import UserError
from ratchet.store.schemas import read_table
from ratchet.verifier import Style, verify
from tasks.grpo.dynamic_sampling import Draw, replace_dead_groups
from tasks.grpo.rollout import Rollout, Scoring
from tests.support.tiny_grpo import GROUP_SIZE, SEEDLING, context, run_stage

SCORING = Scoring(2, ("right",), torch.tensor([2.0]), frozenset({0}))
QUESTIONS = [{"question_id": name, "prompt": f"{name}?", "gold": "4"} for name in "abcdefgh"]
RIGHT = "<SOLUTION>4</SOLUTION>"


def drawn(inputs: list[dict[str, Any]], rewards: list[float]) -> Draw:
    """A draw with these rewards, one token per completion and one more for a right one."""
    ids = [[7] * int(reward) + [0] for reward in rewards]
    texts = [RIGHT if reward else "no" for reward in rewards]
    verdicts = [verify(text, "4", Style.TAGS) for text in texts]
    answer = ([[1]] * len(ids), ids, None, texts, None, {}, None, [])
    rollout = Rollout(inputs, texts, ids, verdicts, torch.tensor(rewards)[:, None], SCORING)
    return Draw(answer, rollout)


def doubled(*names: str) -> list[dict[str, Any]]:
    by_name = {row["question_id"]: row for row in QUESTIONS}
    return [by_name[name] for name in names for _ in range(2)]


def names(rollout: Rollout) -> list[str]:
    return [row["question_id"] for row in rollout.inputs]


def test_dead_groups_are_replaced_until_all_are_live() -> None:
    asked: list[list[str]] = []

    def sample(inputs: list[dict[str, Any]], number: int) -> Draw:
        asked.append([row["question_id"] for row in inputs])
        assert number == len(asked)
        # in the first round the first new group is live, in the second all
        rewards = [1.0, 0.0] + ([1.0, 1.0] if number == 1 else [1.0, 0.0]) * (len(inputs) // 2 - 1)
        return drawn(inputs, rewards)

    first = drawn(doubled("a", "b", "c"), [0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    found = replace_dead_groups(first, sample, QUESTIONS, max_rounds=5, seed="0/0")
    assert found.num_rounds == 2
    assert [len(ids) for ids in asked] == [4, 2]
    assert not {"a", "b", "c"}.intersection(name for ids in asked for name in ids)
    one, two = asked[0][0], asked[1][0]
    assert names(found.batch.rollout) == ["b", "b", one, one, two, two]
    assert found.batch.rollout.live.tolist() == [True, True, True]
    assert found.batch.answer[1] == [[7, 0], [0]] * 3
    assert found.batch.answer[3] == [RIGHT, "no"] * 3
    assert found.batch.answer[7] == []
    assert [names(one) for one in found.discarded] == [
        ["a", "a", "c", "c"],
        [asked[0][2]] * 2,
    ]
    assert found.figures() == {
        "refill_rounds": 2.0,
        "refill_tokens": 2 + 4 + 4,
        "first_live_share": pytest.approx(1 / 3),
    }
    rows = found.discarded[0].rows(5, advantages=None)
    assert [(row["question_id"], row["advantage"], row["reward"]) for row in rows] == [
        ("a", None, 0.0),
        ("a", None, 0.0),
        ("c", None, 2.0),
        ("c", None, 2.0),
    ]


def test_the_budget_ends_it_and_the_dead_stay() -> None:
    first = drawn(doubled("a", "b"), [0.0, 0.0, 1.0, 0.0])
    dead = lambda inputs, number: drawn(inputs, [0.0] * len(inputs))  # noqa: E731
    found = replace_dead_groups(first, dead, QUESTIONS, max_rounds=2, seed="0/0")
    assert found.num_rounds == 2
    assert found.batch.rollout.live.tolist() == [True, False]
    assert len(found.batch.rollout.inputs) == 4
    # no other question is left
    none = replace_dead_groups(first, dead, QUESTIONS[:2], max_rounds=2, seed="0/0")
    assert none.num_rounds == 0
    assert names(none.batch.rollout) == ["a", "a", "b", "b"]
    assert replace_dead_groups(first, dead, QUESTIONS, max_rounds=1, seed="1/0").batch is not first


def test_an_algorithm_sets_what_nobody_else_sets() -> None:
    dapo = load_config("demo", ["grpo.algorithm=dapo"]).grpo
    assert (dapo.epsilon_high, dapo.refill_rounds, dapo.loss_type) == (0.28, 4, "dapo")
    assert dapo.steps == load_config("demo").grpo.steps
    gspo = load_config("demo", ["grpo.algorithm=gspo", "grpo.epsilon=1e-3"]).grpo
    assert (gspo.importance_sampling_level, gspo.epsilon) == ("sequence", 1e-3)
    tree = load_config("demo", ["grpo.algorithm=dapo"]).model_dump(mode="json")
    back = build_config(tree, ["grpo.algorithm=grpo"]).grpo  # as `--run latest --set …` does
    assert (back.epsilon_high, back.refill_rounds) == (None, 0)
    preset = {"questions": tree["questions"], "grpo": {"algorithm": "dapo", "refill_rounds": 9}}
    assert build_config(preset).grpo.refill_rounds == 9
    with pytest.raises(UserError, match=r"'grpo.algorithm' = 'ppo'.*'grpo', 'dapo', 'gspo'"):
        load_config("demo", ["grpo.algorithm=ppo"])


@pytest.mark.slow
def test_a_real_run_trains_on_refilled_batches(tmp_path: Path) -> None:
    def run(folder: Path, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        settings = {"lenient_correctness_check": 1.0}
        ctx = context(folder, SEEDLING)
        run_stage(ctx, steps=steps, weights=settings, refill_rounds=2, max_completion_tokens=24)
        metrics, rollouts = (
            read_table(ctx.out_dir / f"{name}.parquet", name).to_pylist()
            for name in ("metrics", "rollouts")
        )
        return metrics, rollouts

    metrics, rollouts = run(tmp_path / "long", 4)
    assert sum(row["refill_rounds"] for row in metrics) > 0
    for row in metrics:
        mine = [one for one in rollouts if one["step"] == row["step"]]
        trained = [one for one in mine if one["advantage"] is not None]
        dropped = [one for one in mine if one["advantage"] is None]
        assert len(trained) == 2 * GROUP_SIZE
        assert row["refill_tokens"] == sum(one["num_tokens"] for one in dropped)
        assert row["sampled_tokens"] == sum(one["num_tokens"] for one in mine)
        assert row["live_share"] >= row["first_live_share"]
        groups: dict[str, set[float]] = {}
        for one in dropped:
            groups.setdefault(one["question_id"], set()).add(one["reward"])
        assert all(len(rewards) == 1 for rewards in groups.values())  # only dead ones go
        assert "surprise_mean" not in row or row["refill_rounds"] == 0
    # The same steps come out of a shorter run: nothing depends on what came before but the seed.
    shorter, same = run(tmp_path / "short", 2)
    assert same == [row for row in rollouts if row["step"] <= 2]
    assert len(shorter) == 2


def test_several_processes_are_refused() -> None:
    with pytest.raises(UserError, match=r"refill_rounds=4 needs processes=1"):
        load_config("demo", ["grpo.algorithm=dapo", "grpo.processes=2"])
