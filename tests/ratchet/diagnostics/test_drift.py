"""The drift guard's levels and what it does, against values worked out by hand."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ratchet.config.load import load_config
from ratchet.config.run import GuardConfig
from ratchet.diagnostics.drift import DriftError, Guard, Level
from ratchet.errors import UserError
from ratchet.pipeline.plan import make_plan
from ratchet.store.store import Store
from tasks.grpo import drift_guard
from tasks.grpo.diagnose_drift import diagnose_drift
from tasks.grpo.drift_guard import DriftGuardCallback, base_weight_checksums, changed
from tasks.grpo.figures import Surprise, mean_and_error, sampling_figures

HEALTHY = {
    "drift_mean": 3e-7,
    "drift_max": 1e-5,
    "dropped_share": 0.0,
    "effective_sample_share": 1.0,
    "unmasked_ratio_mean": 1.0,
    "unmasked_ratio_se": 1e-7,
}


def found(guard: Guard, **figures: float) -> dict[str, Level]:
    return {one.figure: one.level for one in guard.check(HEALTHY | figures)}


def test_a_healthy_batch_passes() -> None:
    guard = Guard(GuardConfig(), "float32")
    assert found(guard) == {}
    assert guard.check({}) == []  # the trainer's own model sampled


def test_drift_is_held_against_step_one_within_what_rounding_explains() -> None:
    lucky = Guard(GuardConfig(), "float32")
    assert found(lucky) == {}
    assert lucky.drift_level == 1e-5  # not 3e-7
    assert found(lucky, drift_mean=4.9e-5) == {}
    assert found(lucky, drift_mean=5.1e-5) == {"drift_mean": Level.WARN}
    assert found(lucky, drift_mean=2.1e-4) == {"drift_mean": Level.HALT}
    usual = Guard(GuardConfig(), "bfloat16")
    assert found(usual, drift_mean=0.01) == {}
    assert found(usual, drift_mean=0.049) == {}
    assert found(usual, drift_mean=0.051) == {"drift_mean": Level.WARN}
    assert found(usual, drift_mean=0.21) == {"drift_mean": Level.HALT}
    sick = Guard(GuardConfig(), "float32")
    assert found(sick, drift_mean=0.025) == {"drift_mean": Level.HALT}  # at the first step


def test_a_resumed_run_keeps_the_level_of_its_first_step() -> None:
    guard = Guard(GuardConfig(), "bfloat16", first_drift=0.004)
    assert found(guard, drift_mean=0.03) == {"drift_mean": Level.WARN}


def test_lost_completions_are_noticed() -> None:
    guard = Guard(GuardConfig(), "float32")
    assert found(guard, dropped_share=0.1) == {}
    assert found(guard, dropped_share=0.11) == {"dropped_share": Level.WARN}
    assert found(guard, dropped_share=0.58) == {"dropped_share": Level.HALT}
    assert found(guard, effective_sample_share=0.49) == {"effective_sample_share": Level.WARN}
    assert found(guard, effective_sample_share=0.05) == {"effective_sample_share": Level.HALT}


def test_a_ratio_counts_only_beyond_chance() -> None:
    guard = Guard(GuardConfig(), "float32")
    assert found(guard, unmasked_ratio_mean=0.9, unmasked_ratio_se=0.021) == {}
    away = found(guard, unmasked_ratio_mean=0.9, unmasked_ratio_se=0.01)
    assert away == {"unmasked_ratio_mean": Level.WARN}
    away = found(guard, unmasked_ratio_mean=0.75, unmasked_ratio_se=0.01)
    assert away == {"unmasked_ratio_mean": Level.HALT}
    assert guard.check_surprise(0.01, 1e-6) == []  # sure, and too small to matter
    (one,) = guard.check_surprise(0.3, 0.02)
    assert one.level is Level.HALT
    assert "0.300 ± 0.020 (standard error), not 0" in one.words


def test_without_halt_it_only_warns() -> None:
    said: list[str] = []
    guard = Guard(GuardConfig(halt=False), "float32")
    findings = guard.check(HEALTHY | {"drift_mean": 1.0})
    assert guard.act(7, findings, said.append) == []
    assert guard.num_warnings == 1
    assert "step 7: drift 1.0e+00 nats per token, 10000 times" in said[0]
    assert Guard(GuardConfig(), "float32").act(7, findings, said.append) == findings


def test_levels_must_be_in_order() -> None:
    with pytest.raises(UserError, match="warn_drift must be reached before halt_drift"):
        load_config("demo", ["guard.warn_drift=30"])
    with pytest.raises(UserError, match="warn_effective must be reached"):
        load_config("demo", ["guard.halt_effective=0.9"])


def test_levels_change_no_key(tmp_path: Any) -> None:
    store = Store(tmp_path)
    one = make_plan(load_config("demo"), store)
    other = make_plan(load_config("demo", ["guard.halt=false"]), store)
    assert [planned.key for planned in one.nodes] == [planned.key for planned in other.nodes]
    assert one.named("grpo").sections["guard"] != other.named("grpo").sections["guard"]


def test_error_of_a_mean_of_martingale_differences() -> None:
    mean, error = mean_and_error(torch.tensor([1.5, 0.5, 1.0, 2.0], dtype=torch.float64), 1.0)
    assert mean == 1.25
    assert error == pytest.approx(math.sqrt(0.25 + 0.25 + 0 + 1) / 4)


def draws(probabilities: torch.Tensor, count: int) -> torch.Tensor:
    return torch.multinomial(
        probabilities, count, replacement=True, generator=torch.Generator().manual_seed(0)
    )


def test_truncated_sampling_shows_in_the_ratio_or_in_the_surprise() -> None:
    """Top-k sampling under a full policy: if the sampler logs what it sampled from, the mean ratio
    is the mass that was kept; if it logs the full distribution, only the surprise tells."""
    policy = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    truncated = torch.tensor([0.4, 0.3, 0.0, 0.0], dtype=torch.float64) / 0.7
    tokens = draws(truncated, 4000)
    mask = torch.ones(1, 4000)
    entropy = -(policy * policy.log()).sum().expand(1, 4000)

    def figures(logged: torch.Tensor) -> dict[str, float]:
        return sampling_figures(
            {
                "completion_mask": mask,
                "old_per_token_logps": policy[tokens].log()[None],
                "sampling_per_token_logps": logged[tokens].log()[None],
                "importance_sampling_ratio": torch.ones(1, 1),
            }
        )

    assert figures(truncated)["unmasked_ratio_mean"] == pytest.approx(0.7)
    assert figures(policy)["unmasked_ratio_mean"] == 1.0
    guard = Guard(GuardConfig(), "float32")
    surprise = Surprise()
    surprise.add(policy[tokens].log()[None], entropy, mask)
    (finding,) = guard.check_surprise(*surprise.take())
    assert finding.level is Level.HALT  # 4/7 log 0.4 + 3/7 log 0.3 + entropy = 0.24
    surprise.add(policy[draws(policy, 4000)].log()[None], entropy, mask)
    assert guard.check_surprise(*surprise.take()) == []


def test_one_flipped_bit_of_the_base_is_noticed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[0].weight.requires_grad = model[1].weight.requires_grad = False
    before = base_weight_checksums(model)
    assert list(before) == ["0.weight", "1.weight"]
    with torch.no_grad():
        model[0].bias += 1
    assert changed(before, base_weight_checksums(model)) == []
    model[1].weight.data.view(torch.int32)[2, 1] ^= 1
    assert changed(before, base_weight_checksums(model)) == ["1.weight"]


def test_no_process_halts_before_the_first_has_found_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[tuple[str, str]] = []

    def slow_diagnosis(*args: Any) -> Any:
        time.sleep(0.2)
        ended.append(("cause", ""))
        return diagnose_drift(*args)

    monkeypatch.setattr(drift_guard, "diagnose_drift", slow_diagnosis)
    together = threading.Barrier(2, timeout=20)

    def process(rank: int) -> None:
        accelerator = SimpleNamespace(
            is_main_process=rank == 0, wait_for_everyone=lambda: together.wait()
        )
        trainer = SimpleNamespace(
            accelerator=accelerator, state=SimpleNamespace(global_step=0), temperature=1.0
        )
        guard = Guard(GuardConfig(), "float32")
        callback = DriftGuardCallback(GuardConfig(), guard, lambda message: None)
        try:
            callback.check_step(cast(Any, trainer), (9.0, 0.1))
        except DriftError as error:
            ended.append((str(rank), str(error)))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended[0] == ("cause", "")
    said = dict(ended[1:])
    assert set(said) == {"0", "1"}
    assert "Probable cause: " in said["0"]
