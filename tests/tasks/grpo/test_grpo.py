"""Real, tiny GRPO runs with transformers generation: what is kept, and resuming after SIGKILL."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from ratchet.config.run import LoraConfig, PromptFormat
from ratchet.errors import UserError
from ratchet.prompts import prompt_text
from ratchet.store.schemas import read_table
from tasks.runtime.context import StageResult
from tests.support.tiny_grpo import GROUP_SIZE, NUM_QUESTIONS, context, in_process, run_stage
from tests.support.tiny_model import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

TIMES = ("_seconds", "step_time", "tokens_per_second")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StageResult]:
    """Folder and result of one LoRA run over four steps."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_stage(context(folder, model))


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(folder / "out" / f"{name}.parquet", name).to_pylist()
    return rows


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows
    ]


def weights(folder: Path, part: str = "checkpoint/model") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(folder / "out" / f"{part}.safetensors")
    return loaded


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_every_completion_of_every_step_is_kept(trained: tuple[Path, StageResult]) -> None:
    folder, result = trained
    rows = table(folder, "rollouts")
    tokenizer = tiny_tokenizer()
    assert len(rows) == 4 * 2 * GROUP_SIZE
    for i, row in enumerate(rows):
        assert row["step"] == i // (2 * GROUP_SIZE) + 1
        assert row["policy_version"] == row["step"] - 1
        assert row["sample_index"] == i % GROUP_SIZE
        assert row["question_id"] != "q0"  # not selected
        number = int(row["question_id"][1:])
        assert row["prompt"] == prompt_text(
            tokenizer, PromptFormat.TAGS_SHORT, f"What is {number} + 2?", enable_thinking=False
        )
        assert row["finish_reason"] == "stop" or row["num_tokens"] == 8
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert result.sampled_tokens == sum(row["num_tokens"] for row in rows)
    # 4 steps × 2 questions: a pass over all six, then two more
    asked = [row["question_id"] for row in rows[::GROUP_SIZE]]
    assert len(set(asked[:NUM_QUESTIONS])) == NUM_QUESTIONS


def test_advantages_are_the_groups_standardised_rewards(
    trained: tuple[Path, StageResult],
) -> None:
    rows = table(trained[0], "rollouts")
    for start in range(0, len(rows), GROUP_SIZE):
        group = rows[start : start + GROUP_SIZE]
        rewards = [
            2 * row["reward_tests.support.tiny_grpo:letters"]
            + row["reward_lenient_correctness_check"]
            for row in group
        ]
        mean = sum(rewards) / GROUP_SIZE
        std = math.sqrt(sum((value - mean) ** 2 for value in rewards) / (GROUP_SIZE - 1))
        for row, value in zip(group, rewards, strict=True):
            assert row["reward"] == pytest.approx(value, abs=1e-5)
            assert row["advantage"] == pytest.approx((value - mean) / (std + 1e-4), abs=1e-3)


def test_each_metrics_row_is_its_steps_rollouts(trained: tuple[Path, StageResult]) -> None:
    rollouts, metrics = (table(trained[0], name) for name in ("rollouts", "metrics"))
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    for row in metrics:
        mine = [rollout for rollout in rollouts if rollout["step"] == row["step"]]
        count = len(mine)
        expected = {
            "reward": sum(r["reward"] for r in mine) / count,
            "strict": sum(r["strict"] for r in mine) / count,
            "lenient": sum(r["lenient"] for r in mine) / count,
            "truncated_share": sum(r["finish_reason"] == "length" for r in mine) / count,
            "mean_tokens": sum(r["num_tokens"] for r in mine) / count,
            "status/parse_failure": sum(r["status"] == "parse_failure" for r in mine) / count,
            "live_share": sum(
                len({round(r["reward"], 5) for r in mine[i : i + GROUP_SIZE]}) > 1
                for i in range(0, count, GROUP_SIZE)
            )
            * GROUP_SIZE
            / count,
            "policy_version": row["step"] - 1,
            "learning_rate": 1e-2,
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=1e-5), name
        assert row["grad_norm"] > 0
        sampled = sum(r["num_tokens"] for r in mine)
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(sampled)
    assert not any(name.startswith("clip_ratio") for name in metrics[0])


def test_checkpoint_is_the_base_plus_the_adapter(
    trained: tuple[Path, StageResult], model: Path
) -> None:
    from safetensors.torch import load_file

    folder, result = trained
    base, merged = load_file(model / "model.safetensors"), weights(folder)
    adapter = weights(folder, "adapter/adapter_model")
    changed = 0
    for name, before in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in adapter:
            # alpha / r = 2
            before = before + 2 * adapter[f"{key}B.weight"] @ adapter[f"{key}A.weight"]
            changed += 1
        torch.testing.assert_close(merged[name], before, atol=1e-6, rtol=1e-6)
    assert changed == 2 * 7  # every linear layer of both blocks
    assert adapter["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].abs().max() > 1e-3
    assert result.summary["reload_mean_difference"] < 1e-5
    assert json.loads((folder / "out" / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_killed_run_continues_to_the_same_end(
    trained: tuple[Path, StageResult], model: Path, tmp_path: Path
) -> None:
    died = in_process(tmp_path, model, "transformers", 4, kill_at=3)
    assert died.returncode == -9
    assert (tmp_path / "work" / "training" / "checkpoint-2" / "ratchet-complete").exists()
    assert not (tmp_path / "out" / "checkpoint").exists()
    ended = in_process(tmp_path, model, "transformers", 4)
    assert ended.returncode == 0, ended.stderr
    assert "continuing from checkpoint-2" in ended.stdout
    assert "'done': 2" not in ended.stdout
    assert table(tmp_path, "rollouts") == table(trained[0], "rollouts")
    assert without_times(table(tmp_path, "metrics")) == without_times(table(trained[0], "metrics"))
    assert_same_weights(weights(tmp_path), weights(trained[0]))


def test_run_that_died_after_its_last_step_only_finishes(
    trained: tuple[Path, StageResult], model: Path
) -> None:
    folder = trained[0]
    before = table(folder, "metrics"), table(folder, "rollouts"), weights(folder)
    run_stage(context(folder, model))
    assert table(folder, "metrics") == before[0]
    assert table(folder, "rollouts") == before[1]
    assert_same_weights(weights(folder), before[2])


def test_training_ends_when_its_tokens_are_spent(
    trained: tuple[Path, StageResult], model: Path, tmp_path: Path
) -> None:
    whole = table(trained[0], "metrics")
    two_steps = int(whole[0]["sampled_tokens"] + whole[1]["sampled_tokens"])
    run_stage(context(tmp_path, model), max_tokens=two_steps)
    assert without_times(table(tmp_path, "metrics")) == without_times(whole[:2])
    before = weights(tmp_path)
    run_stage(context(tmp_path, model), max_tokens=two_steps)  # as after a death at the end
    assert len(table(tmp_path, "metrics")) == 2
    assert_same_weights(weights(tmp_path), before)


def test_two_passes_over_a_batch_sample_every_other_step(model: Path, tmp_path: Path) -> None:
    run_stage(context(tmp_path, model), num_iterations=2, save_every=1)
    assert [row["step"] for row in table(tmp_path, "rollouts")[:: 2 * GROUP_SIZE]] == [1, 3]
    metrics = table(tmp_path, "metrics")
    assert [row["policy_version"] for row in metrics] == [0, None, 2, None]
    # the second pass is off its policy, so clipping means something there
    assert all("clip_ratio/region_mean" in row for row in metrics)
    saved = sorted(path.name for path in (tmp_path / "work" / "training").glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-4"]


def test_full_fine_tuning_writes_no_adapter(model: Path, tmp_path: Path) -> None:
    result = run_stage(
        context(tmp_path, model),
        steps=2,
        learning_rate=1e-3,
        beta=0.1,
        lora=LoraConfig(enabled=False),
    )
    assert not (tmp_path / "out" / "adapter").exists()
    assert result.summary["reload_mean_difference"] < 1e-6
    metrics = table(tmp_path, "metrics")
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["kl"] > 1e-6  # the reference stayed where the policy started


def test_bfloat16_checkpoint_is_saved_in_bfloat16(model: Path, tmp_path: Path) -> None:
    result = run_stage(context(tmp_path, model), steps=2, dtype="bfloat16")
    assert {value.dtype for value in weights(tmp_path).values()} == {torch.bfloat16}
    adapter = weights(tmp_path, "adapter/adapter_model")
    assert {value.dtype for value in adapter.values()} == {torch.float32}
    assert result.summary["reload_mean_difference"] < 5e-2


def test_wandb_gets_the_figures_of_every_step(model: Path, tmp_path: Path) -> None:
    result = run_stage(context(tmp_path, model), steps=2, wandb="offline")
    assert result.wandb_run is not None
    (logged,) = Path(result.wandb_run).glob("run-*.wandb")
    content = logged.read_bytes()
    for name in (
        b"train/live_share",
        b"train/rewards/tests.support.tiny_grpo:letters/mean",
        b"test-run",
    ):
        assert name in content


def test_a_reward_that_breaks_stops_the_run_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="test_grpo:not_a_number' returned nan"):
        run_stage(context(tmp_path, model), weights={f"{__name__}:not_a_number": 1.0})


def test_what_the_template_writes_of_the_answer_is_judged_with_it(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|assistant|>' -}}{%- endif", "<|assistant|><start_working_out>' -}}{%- endif"
    )
    tiny_model(tokenizer).save_pretrained(tmp_path / "opening")
    tokenizer.save_pretrained(tmp_path / "opening")
    weights = {f"{__name__}:opened": 1.0, "tests.support.tiny_grpo:letters": 1.0}
    run_stage(context(tmp_path, tmp_path / "opening"), steps=1, weights=weights)
    rows = table(tmp_path, "rollouts")
    assert {row[f"reward_{__name__}:opened"] for row in rows} == {1.0}
    assert not any(row["completion"].startswith("<start_working_out>") for row in rows)


def opened(completions: list[str], **columns: Any) -> list[float]:
    """Whether the answer has its opening tag."""
    return [float(text.startswith("<start_working_out>")) for text in completions]


def not_a_number(completions: list[str], **columns: Any) -> list[float]:
    """A broken reward."""
    return [math.nan] * len(completions)


def test_completions_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"need 1\d\d\d tokens, the context has 1024"):
        run_stage(context(tmp_path, model), max_completion_tokens=1000)


def test_rollouts_read_as_one_table(trained: tuple[Path, StageResult]) -> None:
    found = read_table(trained[0] / "out" / "rollouts.parquet", "rollouts")
    assert found.schema.field("reward_tests.support.tiny_grpo:letters").type == pa.float64()
