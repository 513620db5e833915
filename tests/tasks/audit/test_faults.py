"""Each known way to make a sampler another policy is put into a real engine, and the audit must
name it, from the first sync on. Clean pairs of every kind pass, or the audit would cry wolf.

With RATCHET_FAULT_TABLE=FILE the table of faults, probes and diagnoses is written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ratchet.config.run import GrpoConfig
from ratchet.errors import UserError
from tests.support import sync_faults as faults
from tests.support.audited import Kind, Pair, open_kind

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

from tasks.audit.diagnosis import Cause, Probe  # noqa: E402
from tasks.audit.effective import READ  # noqa: E402

ADAPTER = Kind("qwen2", "adapter")
MERGED = Kind("qwen2", "merged")
ROUNDING = Kind("qwen2", "merged", "bfloat16")
PADDED = Kind("qwen2", "adapter", note="320 rows for 261")
FULL = Kind("qwen3", "full")


@dataclass(frozen=True)
class Case:
    """A fault and what the audit must say."""

    name: str
    kind: Kind
    inject: faults.Fault
    probe: Probe
    cause: Cause
    sync: int = 1
    """Sync after which it must be seen; 0 = before any."""


CASES = [
    Case(
        "unmerged before packed, 1 GiB buffer (TRL, server)",
        MERGED,
        faults.unmerged_before_packed(2**30),
        Probe.WIRE,
        Cause.UNMERGED,
    ),
    Case(
        "the same, with most layers sent before",
        MERGED,
        faults.unmerged_before_packed(160_000),
        Probe.WIRE,
        Cause.UNMERGED,
    ),
    Case(
        "the same, seen only in the engine",
        MERGED,
        faults.unmerged_behind_the_tap,
        Probe.WEIGHTS,
        Cause.UNMERGED,
    ),
    Case(
        "bfloat16 on the wire to a float32 engine",
        MERGED,
        faults.bfloat16_on_the_wire,
        Probe.WIRE,
        Cause.WIRE_DTYPE,
    ),
    Case(
        "update answered 200 OK, not carried out",
        MERGED,
        faults.update_not_carried_out,
        Probe.WEIGHTS,
        Cause.NOT_LOADED,
    ),
    Case("prefix cache not reset", MERGED, faults.cache_not_reset, Probe.CACHE, Cause.STALE_CACHE),
    Case("a layer's names missing", MERGED, faults.layer_left_out, Probe.WIRE, Cause.NAMES),
    Case("sampler rounded to 4 bits", MERGED, faults.rounded_to(4), Probe.WEIGHTS, Cause.ROUNDED),
    Case("sampler rounded to 8 bits", MERGED, faults.rounded_to(8), Probe.WEIGHTS, Cause.ROUNDED),
    Case("LoRA dropout", ADAPTER, faults.lora_dropout, Probe.CONFIGURATION, Cause.DROPOUT, 0),
    Case(
        "LoRA dropout, not seen in the settings",
        ADAPTER,
        faults.unseen_dropout,
        Probe.LOGPROBS,
        Cause.DROPOUT,
    ),
    Case(
        "new version's name, old version's adapter",
        ADAPTER,
        faults.adapter_not_loaded,
        Probe.WEIGHTS,
        Cause.NOT_LOADED,
    ),
    Case(
        "a layer missing in the adapter's file",
        ADAPTER,
        faults.adapter_layer_left_out,
        Probe.WIRE,
        Cause.NAMES,
    ),
    Case(
        "generation config in the requests",
        ADAPTER,
        faults.sampling_defaults_told,
        Probe.CONFIGURATION,
        Cause.SAMPLING,
        0,
    ),
    Case(
        "generation config inside the engine, processed log-probs",
        ADAPTER,
        faults.sampling_defaults_leaked,
        Probe.LOGPROBS,
        Cause.SAMPLING,
    ),
    Case(
        "generation config inside the engine, raw log-probs",
        ADAPTER,
        faults.leaked_under_raw_logprobs,
        Probe.LOGPROBS,
        Cause.SAMPLING,
    ),
    Case(
        "raw log-probs",
        ADAPTER,
        faults.raw_logprobs,
        Probe.CONFIGURATION,
        Cause.LOGPROBS_MODE,
        0,
    ),
    Case("tied head not renewed", FULL, faults.head_not_renewed, Probe.WEIGHTS, Cause.TIED),
    Case(
        "merge rounding in bfloat16",
        ROUNDING,
        faults.merge_taken_back,
        Probe.WIRE,
        Cause.MERGE_ROUNDING,
    ),
    Case(
        "vocabulary padded in the sampler only",
        PADDED,
        faults.nothing,
        Probe.CONFIGURATION,
        Cause.VOCABULARY,
        0,
    ),
]
CLEAN = [
    ADAPTER,
    MERGED,
    FULL,
    Kind("qwen3", "adapter"),
    Kind("qwen2", "adapter", "bfloat16"),
    Kind("qwen3", "adapter", mode="server"),
]
"""What must pass."""


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of the fault table, written when all tests have run."""
    before = dict(os.environ)
    rows = [
        "| fault | pair | seen by | at sync | diagnosis |",
        "|---|---|---|---|---|",
    ]
    yield rows
    if file := os.environ.get("RATCHET_FAULT_TABLE"):
        Path(file).write_text("\n".join(rows) + "\n", encoding="utf-8")
    print("\n".join(rows))
    os.environ.clear()  # a colocated engine leaves the variables of a distributed process
    os.environ.update(before)


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One open pair at a time, shared by the tests that follow each other."""
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp("pair")
    made_wrong: Any = nullcontext()
    if kind is ROUNDING:  # the configuration refuses it
        made_wrong = allowing_merges_in_bfloat16()
    if kind is PADDED:
        made_wrong = engine_with_more_rows()
    with made_wrong, open_kind(kind, folder) as made:
        yield made


def allowing_merges_in_bfloat16() -> Any:
    """The refusal of the configuration, taken out."""
    stack = ExitStack()
    for module in ("tasks.stages.audit", "tasks.grpo.build"):
        stack.enter_context(patch(f"{module}.resolved_sync", lambda grpo, dtype: "merged"))
    return stack


def engine_with_more_rows() -> Any:
    """The trainer cuts its embeddings to the tokenizer's size; the engine loads them whole."""
    from tasks.grpo import build
    from tests.support import audited

    def cut(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        model.resize_token_embeddings(model.config.vocab_size - 59)
        return model

    def padded(folder: Path) -> Path:
        return whole(folder, vocab_size=320)

    load, whole = build.load_model, audited.biased_qwen2
    stack = ExitStack()
    stack.enter_context(patch.object(build, "load_model", cut))
    stack.enter_context(patch.object(audited, "biased_qwen2", padded))
    return stack


def together(cases: list[Any]) -> list[Any]:
    """Those of one kind side by side, so that each pair is made once."""
    order = list(dict.fromkeys(case.kind for case in CASES))
    return sorted(cases, key=lambda case: order.index(case.kind))


@pytest.mark.parametrize(
    ("pair", "case"),
    [pytest.param(case.kind, case, id=case.name) for case in together(CASES)],
    indirect=["pair"],
)
def test_fault_is_named_at_the_first_sync(pair: Pair, case: Case, table: list[str]) -> None:
    with case.inject(pair):
        found = pair.audit(num_syncs=1)
    said = found.diagnosis
    table.append(f"| {case.name} | {case.kind} | {said.probe} | {found.sync} | {said.words} |")
    assert (said.probe, said.cause, found.sync) == (case.probe, case.cause, case.sync), said.words


@pytest.mark.parametrize("pair", CLEAN, ids=str, indirect=True)
def test_clean_pair_passes(pair: Pair, table: list[str]) -> None:
    found = pair.audit(num_syncs=3)
    drift = f"drift {found.drift[0]:.1e} to {found.drift[-1]:.1e}" if found.drift else ""
    table.append(f"| none | {pair.kind} | {found.diagnosis.probe or 'none'} | – | {drift} |")
    assert found.ok, found.diagnosis.words
    assert all(row.ok for row in found.rows)
    assert {row.probe for row in found.rows} == set(Probe)
    assert [row.worst for row in found.rows if row.check == READ] == [
        f"all {len(pair.names)} weights"
    ] * 3
    if pair.kind.dtype == "float32":
        assert max(found.drift) < 1e-5


def test_the_configuration_refuses_merges_in_bfloat16() -> None:
    from tasks.grpo.settings import resolved_sync

    with pytest.raises(UserError, match="rounds the base weights"):
        resolved_sync(GrpoConfig(sync="merged"), "bfloat16")
