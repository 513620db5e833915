"""A vLLM server of our own under a trainer: log-probabilities against transformers, versions, what
it refuses, and that it never outlives the trainer."""

from __future__ import annotations

import ast
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratchet.config.run import (
    AuditConfig,
    GrpoConfig,
    LoraConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
)
from ratchet.errors import UserError
from tasks.runtime.supervisor import descendants
from tests.support.tiny_grpo import SEEDLING, context, in_process, run_stage
from tests.tasks.sync.test_sync import assert_one_policy, metrics, redraw, seedling, with_adapter
from tests.tasks.sync.test_upstream_packing import python_blocks

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine_environment")]

PREFIX = [10 + i % 60 for i in range(150)]
"""More than one block of the prefix cache, which has 128 tokens on a CPU."""
GONE_SECONDS = 15.0
"""The supervisor gives its processes 5 seconds before it kills them."""


def logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Transformers' log-probabilities of the tokens after the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A GRPO trainer with its server, and what to audit it with."""
    from tasks.stages.audit import open_pair

    made = open_pair(
        context(tmp_path_factory.mktemp("server"), SEEDLING),
        ModelConfig(),
        PromptConfig(format=PromptFormat.TAGS_SHORT),
        SamplerConfig(engine="vllm", max_completion_tokens=32),
        GrpoConfig(vllm_mode="server", temperature=0.8, lora=LoraConfig(r=4, alpha=8)),
        AuditConfig(syncs=1),
    )
    yield made
    backend = made[0].vllm_generation
    pid = backend.vllm_client.server.process.pid
    backend.close()
    assert session_members(pid) == []


@pytest.fixture(scope="module")
def backend(pair: tuple[Any, Any]) -> Any:
    """The generation backend of that trainer, with an adapter that changes what the model says."""
    found = pair[0].vllm_generation
    redraw(found.model, seed=0)
    return found


def session_members(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[3]) == leader:
                found.append(int(entry.name))
    return found


def test_every_version_reaches_the_server_whole(backend: Any) -> None:
    model, client = backend.model, backend.vllm_client
    gaps, last = [], None
    for step in range(3):
        redraw(model, step)
        backend.next_version = step
        backend.sync_weights()
        assert backend.last_sync.policy_version == step
        wanted, found = logprobs(model, PREFIX), torch.tensor(client.score([PREFIX])[0])
        gaps.append((wanted - found).abs())
        if last is not None:
            assert (wanted - last).abs().mean() > 0.05  # the versions do differ
        last = wanted
        left = [path.name for path in backend.versions.root.iterdir()]
        assert left == [f"version-{step:06d}"]
    every = torch.cat(gaps)
    print(f"server against transformers: mean {every.mean():.1e}, max {every.max():.1e} nats")
    assert every.mean() < 1e-5
    assert every.max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_the_sampled_distribution(
    backend: Any, temperature: float
) -> None:
    backend.sync_as(10 + round(10 * temperature))
    found = backend.sample([PREFIX[:20], PREFIX[5:9]], n=3, temperature=temperature, max_tokens=12)
    assert [one.prompt_ids for one in found] == 3 * [PREFIX[:20]] + 3 * [PREFIX[5:9]]
    assert len({tuple(one.token_ids) for one in found}) > 1
    for one in found:
        wanted = logprobs(backend.model, one.prompt_ids + one.token_ids, temperature)
        wanted = wanted[-len(one.token_ids) :]
        torch.testing.assert_close(torch.tensor(one.logprobs), wanted, atol=1e-4, rtol=0)
    assert backend.facts().sampling == {
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def test_a_new_version_reads_no_cached_prefix_of_the_old(backend: Any) -> None:

    def cached() -> int | None:
        (one,) = backend.sample([PREFIX], n=1, temperature=1.0, max_tokens=1)
        return one.num_cached_tokens

    backend.sync_as(30)
    assert [cached(), cached()] == [0, 128]
    backend.sync_as(31)
    assert [cached(), cached()] == [0, 128]
    backend.vllm_client.reset_prefix_cache()
    assert cached() == 0


def test_weights_read_back_from_the_server(backend: Any) -> None:
    backend.sync_as(40)
    found = dict(backend.effective_weights())
    parameters = dict(backend.model.named_parameters())
    num_adapted = 0
    for name, value in found.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if (b := parameters.get(f"{stem}.lora_B.default.weight")) is not None:
            weight = parameters[f"{stem}.base_layer.weight"]
            wanted = weight + 2 * b @ parameters[f"{stem}.lora_A.default.weight"]
            torch.testing.assert_close(value.float(), wanted, atol=1e-5, rtol=1e-5)
            num_adapted += 1
    assert num_adapted == 3 * 7
    facts = backend.facts()
    assert (facts.mode, facts.dtype, facts.lora_rank) == ("server", "float32", 8)  # vLLM's least
    assert facts.vocab_rows == backend.model.config.vocab_size
    assert facts.logprobs_mode == "processed_logprobs"


def test_the_audit_has_nothing_to_say(pair: tuple[Any, Any]) -> None:
    from tasks.audit.probe import run_audit

    trainer, settings = pair
    found = run_audit(trainer, settings)
    assert found.ok, found.diagnosis.words
    assert {row.probe.value for row in found.rows} == {"P0", "P1", "P2", "P3", "P4"}


def test_the_check_in_the_docs_tells_a_stale_server(backend: Any) -> None:
    from tasks.sync.server import BASE_MODEL

    (check,) = [block for block in python_blocks() if "def nearer_to" in block]
    names: dict[str, Any] = {}
    exec(check, names)
    trainer = SimpleNamespace(vllm_generation=backend)
    backend.next_version = 45
    backend.sync_weights()
    to_policy, to_base = names["nearer_to"](trainer, PREFIX)
    assert to_policy < 1e-5 < 0.05 < to_base
    client = backend.vllm_client
    loaded = client.current
    client.model, client.current = BASE_MODEL, None  # as if no layer had arrived
    to_policy, to_base = names["nearer_to"](trainer, PREFIX)
    client.model, client.current = loaded.name, loaded
    assert to_base < 1e-5 < 0.05 < to_policy


def test_answer_of_another_version_is_refused(backend: Any, tmp_path: Path) -> None:
    from tasks.sync.adapter import AdapterVersions

    client = backend.vllm_client
    backend.next_version = 50
    backend.sync_weights()
    other = AdapterVersions(tmp_path / "other").save(backend.model, 51)
    body = {"lora_name": other.name, "lora_path": str(other.folder)}
    client.request("POST", "/v1/load_lora_adapter", json=body)
    client.model = other.name  # what a faulty client or router would ask for
    with pytest.raises(RuntimeError, match="from version-000051, not from version-000050"):
        client.score([PREFIX])
    with pytest.raises(RuntimeError, match="from version-000051, not from version-000050"):
        backend.generate([PREFIX], None, 1)
    client.request("POST", "/v1/unload_lora_adapter", json={"lora_name": other.name})
    with pytest.raises(RuntimeError, match=r"/v1/completions with 404.*version-000051.*not exist"):
        client.score([PREFIX])
    client.model = "version-000050"
    client.score([PREFIX])


def test_adapter_that_is_not_there_or_does_not_fit(backend: Any, tmp_path: Path) -> None:
    from tasks.sync.adapter import AdapterVersion, AdapterVersions

    client = backend.vllm_client
    with pytest.raises(RuntimeError, match=r"load_lora_adapter with 404.*No adapter found"):
        client.use(AdapterVersion(60, tmp_path / "version-000060", 0))
    large = with_adapter(seedling(), seed=0, rank=16)  # more than the server was made for
    with pytest.raises(RuntimeError, match=r"load_lora_adapter with 500.*rank 16"):
        client.use(AdapterVersions(tmp_path / "large").save(large, 61))


def servers(said: list[str]) -> list[int]:
    """Process ids of the servers that a stage spoke of."""
    return [int(line.split("(process ")[1].split(")")[0]) for line in said if "(process " in line]


def test_server_dies_with_a_killed_run_and_a_run_stops_with_a_killed_server(tmp_path: Path) -> None:
    died = in_process(tmp_path, SEEDLING, "server", 4, kill_at=3)
    assert died.returncode == -9, died.stderr
    events = [ast.literal_eval(line) for line in died.stdout.splitlines() if line[:1] == "{"]
    (first,) = servers([event.get("message", "") for event in events])
    deadline = time.monotonic() + GONE_SECONDS
    while session_members(first) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(first) == []

    said: list[str] = []

    def hear(event: dict[str, Any]) -> None:
        said.append(event.get("message", ""))
        if event.get("done") == 3 and "continuing from checkpoint-2" in said:
            for pid in descendants(servers(said)[0]):
                os.kill(pid, signal.SIGKILL)  # the supervisor then ends as its command did

    ctx = replace(context(tmp_path, SEEDLING), emit=hear)
    with pytest.raises(UserError, match=r"server .* in step 4 .*checkpoint-3 is saved") as caught:
        run_stage(ctx, engine="vllm", vllm_mode="server")
    assert "\n" not in str(caught.value)
    assert "vllm-server.log" in str(caught.value)
    assert "continuing from checkpoint-2" in said
    said.clear()
    run_stage(ctx, engine="vllm", vllm_mode="server")
    assert "continuing from checkpoint-3" in said
    (last,) = servers(said)
    assert session_members(last) == []
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert_one_policy(rows)
