"""Both engines on the seedling: the same interface, the same distribution, no hidden state."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.config.run import ModelConfig, PromptFormat, SamplerConfig
from ratchet.errors import UserError
from ratchet.models.check import SEEDLING, packaged_model_dir
from ratchet.prompts import prompt_ids
from ratchet.questions.symbolic import draw
from ratchet.store.store import Artifact
from tasks.models.checkpoints import ModelLocation, load_tokenizer
from tasks.sampling.engines import PLAIN, Sample, Sampler, Shaping, open_sampler
from tasks.sampling.engines.base import EngineSpec, as_samples, check_lengths
from tasks.sampling.engines.opening import context_for
from tasks.sampling.engines.transformers_engine import Chooser
from tests.support.made_up import artifact

NO_VLLM = importlib.util.find_spec("vllm") is None
VLLM = pytest.param("vllm", marks=pytest.mark.skipif(NO_VLLM, reason="vLLM isn't installed"))
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def seedling(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("model")
    facts = {"path": str(packaged_model_dir(SEEDLING)), "revision": None, "context": 256}
    (folder / "model.json").write_text(json.dumps(facts))
    return artifact(folder, "model", {})


@pytest.fixture(scope="module")
def prompts(seedling: Artifact) -> list[list[int]]:
    """Prompts of different lengths."""
    tokenizer = load_tokenizer(seedling)
    found = [
        prompt_ids(tokenizer, PromptFormat.TAGS_SHORT, item.question, enable_thinking=False)
        for item in draw(24, 5, max_steps=4)
    ]
    assert len({len(ids) for ids in found}) > 5
    return found


@pytest.fixture(scope="module", params=["transformers", VLLM])
def sampler(request: pytest.FixtureRequest, seedling: Artifact) -> Iterator[Sampler]:
    # Fewer sequences at once than rows in a call, so that batches and waiting are exercised.
    config = SamplerConfig(engine=request.param, max_completion_tokens=MAX_TOKENS, max_num_seqs=20)
    with open_sampler(
        seedling, model_config=ModelConfig(path=SEEDLING), sampler=config, max_prompt_tokens=150
    ) as found:
        yield found


def texts(groups: list[list[Sample]]) -> list[list[str]]:
    return [[sample.text for sample in group] for group in groups]


@pytest.mark.slow
def test_a_call_is_unmoved_by_earlier_calls(sampler: Sampler, prompts: list[list[int]]) -> None:
    ask = {"n": 4, "temperature": 1.0, "max_tokens": MAX_TOKENS}
    first = sampler.generate(prompts, seed=1, **ask)
    other = sampler.generate(prompts, seed=2, **ask)
    sampler.generate(prompts[3:9], n=1, temperature=0.0, max_tokens=8, seed=1)
    again = sampler.generate(prompts, seed=1, **ask)
    assert again == first
    assert texts(other) != texts(first)
    assert [len(group) for group in first] == [4] * len(prompts)
    assert any(len(set(group)) > 1 for group in texts(first))


@pytest.mark.slow
def test_greedy_is_one_answer_whatever_the_batch(
    sampler: Sampler, prompts: list[list[int]]
) -> None:
    ask = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    every = sampler.generate(prompts, n=1, seed=1, **ask)
    alone = [sampler.generate([prompt], n=1, seed=2, **ask)[0] for prompt in prompts[:6]]
    assert texts(alone) == texts(every[:6])
    assert texts(sampler.generate(prompts[:3], n=2, seed=3, **ask)) == [
        group * 2 for group in texts(every[:3])
    ]


@pytest.mark.slow
def test_completions_end_where_the_turn_ends(
    sampler: Sampler, prompts: list[list[int]], seedling: Artifact
) -> None:
    tokenizer = load_tokenizer(seedling)
    groups = sampler.generate(prompts, n=2, temperature=1.0, max_tokens=16, seed=4)
    samples = [sample for group in groups for sample in group]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        stopped = sample.finish_reason == "stop"
        assert stopped == (sample.token_ids[-1] == tokenizer.eos_token_id)
        assert sample.token_ids.count(tokenizer.eos_token_id) == int(stopped)
        assert stopped or len(sample.token_ids) == 16
        body = sample.token_ids[:-1] if stopped else sample.token_ids
        assert sample.text == tokenizer.decode(body)
    # The tags are ordinary tokens of this model and survive decoding.
    assert any("<start_working_out>" in sample.text for sample in samples)


@pytest.mark.slow
def test_progress_counts_up_to_everything(sampler: Sampler, prompts: list[list[int]]) -> None:
    seen: list[tuple[int, int]] = []
    groups = sampler.generate(
        prompts,
        n=2,
        temperature=1.0,
        max_tokens=16,
        seed=4,
        on_progress=lambda done, tokens: seen.append((done, tokens)),
    )
    num_tokens = sum(len(sample.token_ids) for group in groups for sample in group)
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == (2 * len(prompts), num_tokens)


@pytest.mark.slow
def test_samples_come_as_often_as_their_probability_says(
    sampler: Sampler, prompts: list[list[int]]
) -> None:
    """Shares of the first token over 600 draws against exp(log-probability)."""
    groups = sampler.generate([prompts[0]] * 6, n=100, temperature=1.0, max_tokens=1, seed=9)
    drawn = [sample.token_ids[0] for group in groups for sample in group]
    for token in set(drawn):
        (logprob,) = sampler.logprobs(prompts[0], [token])
        probability = 2.718281828**logprob
        spread = (probability * (1 - probability) / len(drawn)) ** 0.5
        assert abs(drawn.count(token) / len(drawn) - probability) < 4 * spread + 1 / len(drawn)


@pytest.mark.slow
def test_shaping_cuts_the_distribution_as_its_terms_say(
    sampler: Sampler, prompts: list[list[int]]
) -> None:
    """This prompt's two likeliest first tokens have about 0.58 and 0.41."""

    def drawn(shaping: Shaping, temperature: float = 1.0) -> set[int]:
        groups = sampler.generate(
            [prompts[0]] * 4, n=50, temperature=temperature, max_tokens=1, seed=7, shaping=shaping
        )
        return {sample.token_ids[0] for group in groups for sample in group}

    hot = drawn(PLAIN, temperature=2.0)
    logprobs = {token: sampler.logprobs(prompts[0], [token])[0] for token in hot}
    first, second, *rest = sorted(hot, key=lambda token: -logprobs[token])
    assert 2.718281828 ** logprobs[first] == pytest.approx(0.583, abs=0.005)
    assert 2.718281828 ** logprobs[second] == pytest.approx(0.412, abs=0.005)
    assert len(rest) > 4
    assert drawn(Shaping(top_k=2), temperature=2.0) == {first, second}
    assert drawn(Shaping(top_p=0.7)) == {first, second}
    assert drawn(Shaping(top_p=0.5)) == {first}
    assert drawn(Shaping(min_p=0.6)) == {first, second}  # 0.412 / 0.583 = 0.71
    assert drawn(Shaping(min_p=0.8)) == {first}


def test_tokens_seen_before_are_penalised() -> None:
    import torch

    choose = Chooser(0.0, Shaping(repetition_penalty=2.0), [[0, 1], [2, 2]])
    logits_bv = torch.tensor([[4.0, -1.0, 3.0], [1.0, 0.5, 4.0]])
    # row 0: 4 / 2 = 2, −1 × 2 = −2, 3 stays; row 1: 4 / 2 = 2
    assert choose(logits_bv, torch.tensor([0, 1])).tolist() == [2, 2]
    # now 2 is seen in row 0 too: 2, −2, 1.5; and row 1 alone
    assert choose(logits_bv, torch.tensor([0, 1])).tolist() == [0, 2]
    assert choose(logits_bv[1:] - 2.5, torch.tensor([1])).tolist() == [2]  # −1.5, −2, 0.75
    assert choose(torch.tensor([[1.0, 0.5, 1.5]]), torch.tensor([1])).tolist() == [0]


@pytest.mark.slow
def test_a_prompt_that_leaves_no_room_is_refused(sampler: Sampler) -> None:
    with pytest.raises(UserError, match=r"longest prompt has 250 tokens .* exceeds the context"):
        sampler.generate([[5] * 250], n=1, temperature=1.0, max_tokens=MAX_TOKENS, seed=0)


@pytest.mark.slow
@pytest.mark.skipif(NO_VLLM, reason="vLLM isn't installed")
def test_both_engines_give_the_same_logprobs_and_penalise_alike(
    seedling: Artifact, prompts: list[list[int]]
) -> None:
    found: dict[str, list[list[float]]] = {}
    penalised: list[list[list[str]]] = []
    pairs: list[tuple[list[int], list[int]]] = []
    for engine in ("transformers", "vllm"):
        config = SamplerConfig(engine=engine, max_completion_tokens=MAX_TOKENS, max_num_seqs=16)
        with open_sampler(
            seedling, model_config=ModelConfig(path=SEEDLING), sampler=config
        ) as sampler:
            if not pairs:
                groups = sampler.generate(
                    prompts[:8], n=1, temperature=1.0, max_tokens=MAX_TOKENS, seed=3
                )
                pairs = [
                    (prompt, group[0].token_ids)
                    for prompt, group in zip(prompts[:8], groups, strict=True)
                ]
            found[engine] = [sampler.logprobs(prompt, tokens) for prompt, tokens in pairs]
            penalty = Shaping(repetition_penalty=1.3)
            groups = sampler.generate(
                prompts[:8], n=1, temperature=0.0, max_tokens=24, seed=3, shaping=penalty
            )
            penalised.append(texts(groups))
    assert penalised[0] == penalised[1]
    for left, right, (_, tokens) in zip(*found.values(), pairs, strict=True):
        assert len(left) == len(right) == len(tokens)
        assert max(abs(a - b) for a, b in zip(left, right, strict=True)) <= 1e-4
        assert min(left) < -0.01  # not all certain: the comparison says something


@pytest.mark.slow
@pytest.mark.skipif(NO_VLLM, reason="vLLM isn't installed")
def test_the_cache_on_a_cpu_is_what_all_sequences_need_within_an_eighth(
    seedling: Artifact,
) -> None:
    from transformers import LlamaConfig, Qwen2Config

    from tasks.sampling.engines.vllm_engine import cache_gib

    spec = EngineSpec(
        location=ModelLocation("", None),
        tokenizer=load_tokenizer(seedling),
        stop_ids=(1,),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=128,
        gpu_memory_utilization=0.5,
    )
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    llama = LlamaConfig(hidden_size=576, **shape)
    # 2 × 30 layers × 3 heads × 64 × 4 bytes = 46,080 bytes a token; 128 × 1,024 tokens: 5.6 GiB
    assert cache_gib(llama, spec, 1024 * 2**30) == 6
    assert cache_gib(llama, spec, 16 * 2**30) == 2
    assert cache_gib(llama, spec, 4 * 2**30) == 1
    # Qwen2's configuration names no head_dim.
    assert cache_gib(Qwen2Config(hidden_size=576, **shape), spec, 1024 * 2**30) == 6


def test_text_leaves_out_the_end_and_what_follows_it(tmp_path: Path, seedling: Artifact) -> None:
    tokenizer = load_tokenizer(seedling)
    end = tokenizer.eos_token_id
    spec = EngineSpec(
        location=ModelLocation("", None),
        tokenizer=tokenizer,
        stop_ids=(end,),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        gpu_memory_utilization=0.5,
    )
    words = tokenizer.encode("<SOLUTION>7</SOLUTION>", add_special_tokens=False)
    ended, cut, empty = as_samples(spec, [[*words, end, *words], words, [end]])
    assert ended == Sample("<SOLUTION>7</SOLUTION>", [*words, end], "stop")
    assert cut == Sample("<SOLUTION>7</SOLUTION>", words, "length")
    assert empty == Sample("", [end], "stop")


def test_context_is_what_is_needed_and_no_more_than_there_is() -> None:
    assert context_for(1024, ModelConfig(), 100) == 128
    assert context_for(1024, ModelConfig(max_model_len=110), 100) == 110
    assert context_for(1024, ModelConfig(), None) == 1024
    assert context_for(None, ModelConfig(max_model_len=512), None) == 512
    with pytest.raises(UserError, match="need 130 tokens, the context has 128"):
        context_for(128, ModelConfig(), 130)
    with pytest.raises(UserError, match=r"set model\.max_model_len"):
        context_for(None, ModelConfig(), 10)


def test_lengths_that_just_fit_pass() -> None:
    check_lengths([[1] * 10, [1] * 60], 4, 64)
    with pytest.raises(UserError, match="longest prompt has 61 tokens"):
        check_lengths([[1] * 61], 4, 64)
