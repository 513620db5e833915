"""The audit's parts without an engine: the rule that names a cause, what a weight is instead, the
draws, and what a failed audit does to a run."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks.audit.compare import Instead, compare
from tasks.audit.diagnosis import ADVICE, Cause, Finding, Gap, Gaps, Probe, diagnose
from tasks.audit.page import worst_rows
from tasks.audit.reference import UPDATE_SHARE, Reference, group_of
from tests.conftest import REPO
from tests.flows.cli.test_cli import RATCHET

LIMIT = Gap(1e-5, 1e-3)
SAME, FAR = Gap(1e-7, 1e-6), Gap(1e-2, 0.1)


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({}, Cause.NONE),
        ({"prompt_trainer": FAR, "generated_trainer": FAR}, Cause.WEIGHTS_OR_FORWARD),
        ({"generated_prompt": FAR, "generated_trainer": FAR}, Cause.CACHE_OR_SAMPLING),
        ({"generated_prompt": FAR, "generated_above": 0.5}, Cause.STALE_CACHE),
        ({"generated_prompt": FAR, "generated_above": 1.0}, Cause.SAMPLING),
        ({"train_eval": FAR, "prompt_trainer": FAR}, Cause.DROPOUT),
        ({"generated_trainer": FAR}, Cause.WEIGHTS_OR_FORWARD),
        ({"generated_trainer": Gap(1e-6, 0.1)}, Cause.WEIGHTS_OR_FORWARD),  # one token is enough
        ({"generated_trainer": Gap(math.nan, math.nan)}, Cause.WEIGHTS_OR_FORWARD),
        ({"surprise": (0.3, 0.05)}, Cause.SAMPLING),  # 6 standard errors
        ({"surprise": (-0.2, 0.05)}, Cause.NONE),  # 4
    ],
)
def test_three_log_probabilities_point_to_the_cause(
    known: dict[str, Gap | float | tuple[float, float]], cause: Cause
) -> None:
    same = {"generated_trainer": SAME, "prompt_trainer": SAME, "generated_prompt": SAME}
    if len(known) != 1 or "generated_trainer" not in known:
        known = same | known
    found = diagnose(Gaps(LIMIT, **known))  # type: ignore[arg-type]
    assert found.cause is cause
    assert found.ok == (cause is Cause.NONE)
    assert found.probe is (None if cause is Cause.NONE else Probe.LOGPROBS)


def test_what_lies_upstream_is_named_first() -> None:
    cache = Finding(Probe.CACHE, Cause.STALE_CACHE, "cached tokens were read")
    wire = Finding(Probe.WIRE, Cause.UNMERGED, "tensors went out as base weights")
    found = diagnose(Gaps(LIMIT, prompt_trainer=FAR, findings=(cache, wire)))
    assert (found.probe, found.cause) == (Probe.WIRE, Cause.UNMERGED)
    assert found.words == f"Tensors went out as base weights. {ADVICE[Cause.UNMERGED]}"


def test_every_cause_comes_with_advice() -> None:
    assert set(ADVICE) == set(Cause)


class Small(nn.Module):
    """Two linear layers and a norm under the names of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(3, 2, bias=False)
        self.norm = nn.LayerNorm(2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(self.q_proj.weight, 2.0)

    def get_output_embeddings(self) -> nn.Module:
        """The head, of two tokens."""
        return self.head


def adapted() -> Reference:
    """A reference whose adapter is A = (1, 0, 2), B = (3, 1)ᵀ with scale 2, merged for a sync."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=1, lora_alpha=2, target_modules=["q_proj"])
    model = get_peft_model(Small(), config)
    layer = model.base_model.model.q_proj
    layer.lora_A["default"].weight.data = torch.tensor([[1.0, 0.0, 2.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[3.0], [1.0]])
    return Reference(model, merged=True)


def test_expected_weights_are_base_plus_scaled_product() -> None:
    reference = adapted()
    wanted = torch.tensor([[8.0, 2.0, 14.0], [4.0, 2.0, 6.0]])  # 2 + 2 · B·A
    assert torch.equal(reference.expected("q_proj.weight").float(), wanted)
    assert reference.names == ["q_proj.weight", "norm.weight", "head.weight"]
    assert torch.equal(reference.at_base("q_proj.weight"), torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, Cause.NUMBER_FORMAT),
        ({"kv_cache_dtype": "fp8"}, Cause.NUMBER_FORMAT),
        ({"quantization": "fp8"}, Cause.QUANTISED),
        ({"logprobs_mode": "raw_logprobs"}, Cause.LOGPROBS_MODE),
        ({"vocab_rows": 64}, Cause.VOCABULARY),
        ({"lora_rank": None}, Cause.RANK),
    ],
)
def test_what_an_engine_says_of_itself_is_held_against_the_trainer(
    said: dict[str, Any], cause: Cause | None
) -> None:
    pytest.importorskip("vllm")
    from tasks.audit.configuration import check_configuration
    from tasks.sync.types import EngineFacts

    told: dict[str, Any] = {
        "mode": "server",
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "logprobs_mode": "processed_logprobs",
        "vocab_rows": 2,
        "max_model_len": 256,
        "block_size": 16,
        "prefix_caching": True,
        "lora_rank": 8,
        "sampling": None,
    }
    facts = EngineFacts(**(told | said))
    report = check_configuration(facts, adapted(), "float32", "no", by_adapter=True)
    assert [one.cause for one in report.findings] == ([] if cause is None else [cause])
    assert sum(not row.ok for row in report.rows) == (cause is not None)


def test_versions_are_random_and_of_the_size_asked_for() -> None:
    reference = adapted()
    before = reference.expected("q_proj.weight")
    reference.redraw(1)
    update = reference.expected("q_proj.weight") - 2.0
    size = float(update.norm()) / (2.0 * math.sqrt(6))
    assert size == pytest.approx(UPDATE_SHARE, rel=1e-5)
    assert torch.equal(reference.before("q_proj.weight"), before)
    # the mark moves with each version, the head never
    assert reference.changing("norm.weight") and not reference.changing("head.weight")
    assert not torch.equal(reference.expected("norm.weight"), torch.ones(2))


def test_a_wrong_weight_is_told_by_what_it_is_instead() -> None:
    reference = adapted()
    reference.redraw(1)
    name = "q_proj.weight"
    right, base = reference.expected(name), reference.at_base(name)
    for value, instead in (
        (right.float(), None),
        (base, Instead.BASE),
        (reference.before(name).float(), Instead.PREVIOUS),
        (right.bfloat16(), Instead.BFLOAT16),
        (right.float() * 1.02, Instead.ROUNDED),
        (-right.float(), Instead.OTHER),
        (right.float()[:1], Instead.SHAPE),
        (torch.full((2, 3), math.nan), Instead.BROKEN),
    ):
        assert compare(reference, name, value, "float32").instead is instead, instead
    stale = compare(reference, name, reference.before(name).float(), "float32")
    assert stale.error == pytest.approx(1)  # all of the update is missing


def test_a_moved_base_is_measured_against_its_size() -> None:
    reference = adapted()
    with torch.no_grad():
        reference.model.base_model.model.head.weight[:] = 1.0
    reference.base["head.weight"] = torch.full((2, 2), 1.0)
    assert set(reference.base_moved().values()) == {0.0}
    with torch.no_grad():
        reference.model.base_model.model.head.weight[0, 0] += 0.5
    assert reference.base_moved()["head.weight"] == pytest.approx(0.25)  # 0.5 of 2


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.self_attn.k_proj.bias", "attention k"),
        ("model.layers.3.self_attn.k_norm.weight", "norms"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("lm_head.weight", "head"),
        ("model.rotary.inv_freq", "other"),
    ],
)
def test_weights_have_groups(name: str, group: str) -> None:
    assert group_of(name) == group


def test_draws_from_another_distribution_surprise() -> None:
    from tasks.audit.logprobs import Scored, surprise

    # p = 0.5: log p is minus the entropy, whatever is drawn
    even = math.log(0.5)
    assert surprise(Scored([[even, even]], [[-even, -even]])) == (0.0, 0.0)
    # p = 0.9 drawn every time: too likely by 0.1 · (log 0.9 − log 0.1) = 0.2197
    likely, entropy = math.log(0.9), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    mean, error = surprise(Scored([[likely] * 3], [[entropy] * 3]))
    assert mean == pytest.approx(0.2197, abs=1e-4)
    assert error == pytest.approx(0, abs=1e-12)


def test_a_table_shows_the_worst_of_all_syncs() -> None:
    rows = [
        {"probe": "P3", "check": "c", "group": "mean", "ok": True, "value": 2.0, "sync": 1},
        {"probe": "P3", "check": "c", "group": "mean", "ok": False, "value": 1.0, "sync": 2},
        {"probe": "P1", "check": "c", "group": "mean", "ok": True, "value": 0.0, "sync": 1},
    ]
    assert [(row["probe"], row["sync"]) for row in worst_rows(rows)] == [("P1", 1), ("P3", 2)]


def test_a_stage_that_refuses_stops_the_run_though_its_artifact_is_there() -> None:
    from flows.execution.executor import EXIT_CODES, _judged
    from tasks.runtime.launch import WorkerOutcome, WorkerState

    said = WorkerOutcome(WorkerState.REUSED, summary={"refused": "dropout: …"})
    judged = _judged(said)
    assert (judged.state, judged.message) == (WorkerState.REFUSED, "dropout: …")
    assert EXIT_CODES[judged.state] == 1
    passed = WorkerOutcome(WorkerState.BUILT, summary={"passed": True})
    assert _judged(passed) is passed


@pytest.mark.slow
def test_failed_audit_ends_with_exit_code_1_and_the_cause(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = tmp_path / "model"
    shutil.copytree(REPO / "data" / "seedling", model)
    config = json.loads((model / "config.json").read_text())
    # TRL turns dropout modules off; this number it leaves alone.
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    done = subprocess.run(
        [
            RATCHET,
            *("audit-sync", "--preset", "demo", "--set", f"model.path={model}"),
            *("--set", "audit.syncs=1", "--store", str(tmp_path / "store")),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PREFECT_HOME": str(tmp_path / "prefect"), "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Failed at sync 0, seen by P0: dropout" in done.stdout
    (manifest,) = (tmp_path / "store" / "audit").glob("*/manifest.json")
    summary = json.loads(manifest.read_text())
    assert summary["summary"]["passed"] is False
    assert list(summary["parents"]) == ["model"]
    assert (manifest.parent / "audit.parquet").is_file()
