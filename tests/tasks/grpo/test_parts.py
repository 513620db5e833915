"""The parts of the GRPO stage that need no training, against values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratchet.config.run import GrpoConfig, LoraConfig, RewardsConfig
from ratchet.errors import UserError
from ratchet.rewards.weights import DEFAULT_WEIGHTS_BOXED, DEFAULT_WEIGHTS_TAGS
from ratchet.rollouts.training_log import StepRecords
from ratchet.verifier import Style
from tasks.grpo.data import rl_questions, training_order
from tasks.grpo.figures import effective_share, live_groups, sampling_figures
from tasks.grpo.finish import edge_means, summarise
from tasks.grpo.rewards import CheckedReward, checked_rewards
from tasks.grpo.settings import (
    accumulation_steps,
    generation_batches,
    resolved_sync,
    training_dtype,
    trl_config,
)
from tasks.models.checkpoints import ModelLocation
from tasks.sampling.engines.base import EngineSpec
from tasks.stages.grpo import num_devices
from tests.support.tiny_grpo import letters

NAN = float("nan")


def test_groups_are_live_when_their_rewards_differ() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, NAN, 2.0, NAN, NAN])
    assert live_groups(rewards, 2).tolist() == [False, True, False, False]


def test_effective_share_is_kishs() -> None:
    # (1 + 1 + 2)² / (1 + 1 + 4) / 4 weights, one of them dropped
    assert effective_share(torch.tensor([1.0, 1.0, 2.0, 0.0])) == pytest.approx(16 / 6 / 4)
    assert effective_share(torch.zeros(3)) == 0.0


def test_drift_is_the_mean_over_sampled_tokens_only() -> None:
    scored = {
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-3.0, -9.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.5, -2.0], [-2.0, 0.0]]),
        "importance_sampling_ratio": torch.tensor([[math.exp(0.5)], [0.0]]),
    }
    figures = sampling_figures(scored)
    assert figures["drift_mean"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert figures["drift_max"] == 1.0
    assert figures["dropped_share"] == 0.5
    assert figures["effective_sample_share"] == pytest.approx(0.5)
    ratios = [math.exp(0.5), 1.0, math.exp(-1.0)]
    assert figures["unmasked_ratio_mean"] == pytest.approx(sum(ratios) / 3)
    squares = sum((ratio - 1) ** 2 for ratio in ratios)
    assert figures["unmasked_ratio_se"] == pytest.approx(math.sqrt(squares) / 3)


def test_no_drift_without_a_sampler() -> None:
    assert sampling_figures({"completion_mask": torch.ones(1, 1)}) == {}


def test_training_order_is_whole_passes_from_a_seed() -> None:
    order = training_order(4, 10, seed=1)
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert order[:4] != order[4:8]
    assert order == training_order(4, 10, seed=1)[:10]
    # a longer run sees the same questions first
    assert order == training_order(4, 14, seed=1)[:10]
    assert order != training_order(4, 10, seed=2)


def test_step_seeds_differ_by_run_step_and_process() -> None:
    from tasks.grpo.trainer import step_seed

    seeds = {step_seed(run, step, rank) for run in (0, 1) for step in (0, 1) for rank in (0, 1)}
    assert len(seeds) == 8
    assert step_seed(0, 1, 0) == step_seed(0, 1, 0)


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    from tasks.grpo.trainer import RolloutTrainer

    at_step_7 = SimpleNamespace(state=SimpleNamespace(global_step=7))
    with pytest.raises(UserError, match=r"gradient of GRPO step 7 is nan, .* grpo\.learning_rate"):
        RolloutTrainer.log(at_step_7, {"loss": 0.1, "grad_norm": NAN})


def test_sync_is_by_adapter_for_lora_and_merged_without() -> None:
    assert resolved_sync(GrpoConfig(), "float32") == "adapter"
    assert resolved_sync(GrpoConfig(lora=LoraConfig(enabled=False)), "bfloat16") == "merged"
    assert resolved_sync(GrpoConfig(sync="merged"), "float32") == "merged"
    with pytest.raises(UserError, match="rounds the base weights"):
        resolved_sync(GrpoConfig(sync="merged"), "bfloat16")
    with pytest.raises(UserError, match=r"needs grpo\.lora\.enabled"):
        resolved_sync(GrpoConfig(sync="adapter", lora=LoraConfig(enabled=False)), "float32")


def test_full_fine_tuning_keeps_float32_weights() -> None:
    assert training_dtype(GrpoConfig(), "bfloat16") == "bfloat16"
    assert training_dtype(GrpoConfig(lora=LoraConfig(enabled=False)), "bfloat16") == "float32"


def test_one_step_is_prompts_times_group_size() -> None:
    grpo = GrpoConfig(prompts_per_step=8, group_size=8, micro_batch_size=16)
    assert accumulation_steps(grpo, 1) == 4
    assert accumulation_steps(grpo, 2) == 2
    with pytest.raises(UserError, match=r"64 completions can't be split .* of 16 on 3 process"):
        accumulation_steps(grpo, 3)


def trl_settings(
    tmp_path: Path, grpo: GrpoConfig, dtype: str = "float32", use_vllm: bool = False
) -> Any:
    spec = EngineSpec(
        location=ModelLocation("somewhere", None),
        tokenizer=None,  # type: ignore[arg-type]
        stop_ids=(1,),
        dtype=dtype,
        max_model_len=100,
        max_num_seqs=8,
        gpu_memory_utilization=0.3,
    )
    return trl_config(
        grpo,
        spec,
        folder=tmp_path,
        seed=7,
        num_processes=1,
        use_vllm=use_vllm,
        max_completion_tokens=40,
        reward_weights=[2.0],
        report_to=[],
    )


def test_trl_gets_the_run_settings_and_no_truncated_sampling(tmp_path: Path) -> None:
    grpo = GrpoConfig(
        prompts_per_step=4,
        group_size=6,
        micro_batch_size=8,
        loss_type="dr_grpo",
        epsilon_high=0.28,
        num_iterations=2,
        steps=5,
        save_every=3,
    )
    config = trl_settings(tmp_path, grpo)
    assert config.generation_batch_size == 24
    assert config.gradient_accumulation_steps == config.steps_per_generation == 3
    assert (config.top_p, config.top_k, config.min_p) == (1.0, 0, None)
    assert (config.lr_scheduler_type, config.loss_type) == ("constant", "dr_grpo")
    assert (config.epsilon, config.epsilon_high, config.beta) == (0.2, 0.28, 0.0)
    assert config.max_grad_norm == 1.0
    assert not config.bf16
    # never between the two passes over one batch
    assert config.save_steps == 4
    assert generation_batches(grpo) == 3


def test_a_server_is_not_asked_for_what_its_api_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    colocated = trl_settings(tmp_path, GrpoConfig(), use_vllm=True)
    assert colocated.vllm_mode == "colocate"
    assert colocated.generation_kwargs == {"stop_token_ids": [1], "detokenize": False}
    server = trl_settings(tmp_path, GrpoConfig(vllm_mode="server"), use_vllm=True)
    assert server.vllm_mode == "server"
    assert server.generation_kwargs == {"stop_token_ids": [1]}


def test_bfloat16_trains_under_autocast_only_without_lora(tmp_path: Path) -> None:
    full = GrpoConfig(lora=LoraConfig(enabled=False))
    assert trl_settings(tmp_path, full, dtype="bfloat16").bf16
    assert not trl_settings(tmp_path, GrpoConfig(), dtype="bfloat16").bf16


def test_rewards_are_the_styles_own_unless_set() -> None:
    rewards, weights = checked_rewards(RewardsConfig(), Style.TAGS)
    assert [reward.__name__ for reward in rewards] == list(DEFAULT_WEIGHTS_TAGS)
    assert sum(weights) == 5.75
    rewards, _ = checked_rewards(RewardsConfig(), Style.BOXED)
    assert [reward.__name__ for reward in rewards] == list(DEFAULT_WEIGHTS_BOXED)
    rewards, weights = checked_rewards(
        RewardsConfig(weights={"tiny_grpo:letters": 0.5}), Style.TAGS
    )
    assert (rewards[0].__name__, weights) == ("tiny_grpo:letters", [0.5])


def test_a_reward_must_return_one_finite_number_each() -> None:
    good = CheckedReward("letters", letters)
    assert good(["ab1c", ""], gold=["1", "2"]) == [0.75, 0.0]
    assert CheckedReward("none", lambda completions, **_: [None])(["a"]) == [None]
    with pytest.raises(UserError, match="'short' returned 1 values for 2 completions"):
        CheckedReward("short", lambda completions, **_: [1.0])(["a", "b"])
    for bad in (NAN, math.inf):
        with pytest.raises(UserError, match=f"'bad' returned {bad}: return a finite number"):
            CheckedReward("bad", lambda completions, bad=bad, **_: [bad])(["a"])


def rollout(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "question_id": "q",
        "sample_index": 0,
        "prompt": "p",
        "completion": "c",
        "num_tokens": 3,
        "finish_reason": "stop",
        "status": "ok",
        "strict": True,
        "lenient": True,
        "reward": 1.0,
        "advantage": 0.0,
        "policy_version": step - 1,
        "reward_letters": 1.0,
    } | fields


def test_records_forget_what_a_resumed_run_will_write_again(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    for step in (1, 2, 3):
        records.write_metrics(step, {"step": step, "loss": step / 2})
        records.write_rollouts(step, 0, [rollout(step)])
    records.write_rollouts(4, 0, [rollout(4)])  # died before the step was done
    again = StepRecords(tmp_path)
    again.forget_after(2)
    again.write_rollouts(3, 0, [rollout(3, completion="new")])
    again.write_metrics(3, {"step": 3, "loss": None})
    assert [row["loss"] for row in again.metrics()] == [0.5, 1.0, None]
    table = again.rollouts()
    assert table.column("step").to_pylist() == [1, 2, 3]
    assert table.column("completion").to_pylist() == ["c", "c", "new"]


def test_records_of_several_processes_are_read_together(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    records.write_rollouts(1, 1, [rollout(1, sample_index=1)])
    records.write_rollouts(1, 0, [rollout(1)])
    assert [row["sample_index"] for row in records.rollouts_of(1)] == [0, 1]


def test_a_gap_in_the_steps_is_an_error(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    records.write_metrics(1, {"step": 1})
    records.write_metrics(3, {"step": 3})
    with pytest.raises(AssertionError, match=r"\[1, 3\]"):
        records.metrics()


def test_first_and_last_are_means_over_a_tenth_of_the_steps() -> None:
    rows = [{"step": i, "reward": float(i), "other": None} for i in range(1, 21)]
    assert edge_means(rows, "reward") == (1.5, 19.5)
    assert edge_means(rows[:5], "reward") == (1.0, 5.0)
    assert edge_means(rows, "other") == (None, None)
    assert edge_means(rows, "missing") == (None, None)


def test_summary_adds_up_the_steps() -> None:
    rows = [
        {"step": 1, "step_seconds": 2.0, "generate_seconds": 1.0, "drift_mean": 1e-6}
        | {"drift_max": 3e-6, "live_share": 1.0, "dropped_share": 0.0},
        {"step": 2, "step_seconds": 3.0, "drift_mean": 3e-6, "drift_max": 2e-6, "live_share": 0.5},
    ]
    summary = summarise(rows, num_tokens=100)
    assert summary["train_seconds"] == 5.0
    assert summary["generate_seconds"] == 1.0
    assert summary["drift_mean"] == pytest.approx(2e-6)
    assert summary["drift_max"] == 3e-6
    assert summary["live_share_mean"] == 0.75
    assert summary["reward_first"] is None


def test_device_seconds_count_every_gpu_that_training_keeps() -> None:
    def kept(device: str, processes: int, *, use_vllm: bool = True, **grpo: Any) -> int:
        accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
        trainer = SimpleNamespace(accelerator=accelerator, use_vllm=use_vllm)
        return num_devices(GrpoConfig(**grpo), trainer)  # type: ignore[arg-type]

    apart = {"vllm_mode": "server", "vllm_server_device": "2"}
    assert kept("cpu", 2) == 1
    assert kept("cuda", 1) == 1
    assert kept("cuda", 2, **apart) == 3
    assert kept("cuda", 2, vllm_mode="server") == 2  # the server is on the trainer's
    assert kept("cuda", 2, use_vllm=False, **apart) == 2


def test_no_question_for_rl_is_said_in_one_line(tmp_path: Path) -> None:
    from tests.support.made_up import artifact, question

    row = {"question_id": "q1", "num_samples": 8, "pass_rate_lenient": 0.0}
    row |= {"pass_rate_strict": 0.0, "bucket": "always_wrong", "role": "warmup", "why": "wrong"}
    made = {
        "questions": artifact(tmp_path / "q", "questions", {"questions": [question("q1")]}),
        "selection": artifact(tmp_path / "s", "filter", {"selection": [row]}),
    }
    with pytest.raises(UserError, match="none of the 1 questions was selected for RL"):
        rl_questions(made)


@pytest.mark.slow
def test_ranks_are_rounded_up_to_what_vllm_takes() -> None:
    pytest.importorskip("vllm")
    from tasks.sync.engine import engine_rank

    assert [engine_rank(rank) for rank in (1, 2, 8, 9, 32, 300)] == [1, 8, 8, 16, 32, 320]
    with pytest.raises(UserError, match=r"grpo\.lora\.r=600 is more than vLLM can sample"):
        engine_rank(600)
