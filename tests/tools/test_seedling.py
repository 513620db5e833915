"""The committed seedling and the script that makes it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import PromptFormat
from ratchet.prompts import prompt_ids, prompt_text
from ratchet.questions import symbolic
from ratchet.questions.rewrite import rewrite_solution
from ratchet.verifier import Style, Verdict, verify
from tests.conftest import REPO
from tools.seedling.corpus import careless_rates, careless_steps, corpus
from tools.seedling.make import ROLES, TAGS, Recipe, train_seedling
from tools.seedling.stories import frame, heldout_frames, tell

SEEDLING = REPO / "data" / "seedling"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SEEDLING)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).eval()


def test_files_are_small_and_hold_no_sampling_settings() -> None:
    assert (SEEDLING / "model.safetensors").stat().st_size <= 8_000_000
    settings = json.loads((SEEDLING / "generation_config.json").read_text())
    assert set(settings) == {"eos_token_id", "pad_token_id", "transformers_version"}
    config = json.loads((SEEDLING / "config.json").read_text())
    assert config["head_dim"] == 32
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"


def test_tags_are_single_tokens_that_survive_decoding(tokenizer: Any) -> None:
    text = "<start_working_out>\n48/2=24\n<end_working_out>\n<SOLUTION>24</SOLUTION>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [t for t in tokens if t in TAGS] == list(TAGS)
    assert [t for t in tokens if t.isdigit()] == list("4822424")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not set(TAGS) & set(tokenizer.all_special_tokens)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


def test_chat_template(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=False)
    assert rendered == "<|system|>S<|user|>U<|assistant|>A<|end|>"
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert asked == "<|system|>S<|user|>U<|assistant|>"
    both = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, m in zip(both["input_ids"], both["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(answer) == "A<|end|>"


def test_prompts_read_as_in_training(tokenizer: Any) -> None:
    """The prompt of the pipeline is the start of a training example."""
    question = "Ada has 3 pens. Ben has 2 more than Ada. How many pens does Ben have?"
    text = prompt_text(tokenizer, PromptFormat.TAGS_SHORT, question, enable_thinking=False)
    assert text == f"{ROLES[1]}{question}\nAnswer in tags.{ROLES[2]}"
    ids = prompt_ids(tokenizer, PromptFormat.TAGS_SHORT, question, enable_thinking=False)
    assert tokenizer.decode(ids) == text


def test_corpus_never_shows_a_heldout_template() -> None:
    frames = heldout_frames()
    drawn = symbolic.draw(300, 1, "heldout")
    assert {frame(q.question) for q in drawn} == set(frames)
    users = [e.user.rsplit("\n", 1)[0] for e in corpus(3000, seed=4)]
    assert not frames & {frame(user) for user in users}


def test_careful_corpus_is_right_and_in_the_format_asked_for() -> None:
    styles = {"tags.": Style.TAGS, "####.": Style.HASH, "box.": Style.BOXED}
    for example in corpus(400, seed=5, careless=0.0):
        style = styles.get(example.user.rsplit(" ", 1)[-1])
        if style is not None:  # not bare arithmetic
            gold = example.assistant.split("=")[-1].split("\n")[0]
            assert verify(example.assistant, gold, style).strict, example


def test_reference_solutions_in_tags_are_what_the_corpus_teaches() -> None:
    """Supervised fine-tuning continues in the manner that the model already has."""
    taught = {e.user: e.assistant for e in corpus(600, seed=6, careless=0.0)}
    matched = 0
    for item in symbolic.draw(600, 6, "seen"):
        answer = taught.get(f"{item.question}\nAnswer in tags.")
        if answer is not None:
            assert answer == rewrite_solution(item.reference_solution, item.gold, Style.TAGS)
            matched += 1
    assert matched > 50


def test_careless_solutions_are_wrong() -> None:
    rng = random.Random(0)
    assert careless_steps([("3*4", 12), ("12+5", 17)], rng) == [("3*4", 12)]
    assert {careless_steps([("8-2", 6)], rng)[0] for _ in range(50)} == {
        ("8+2", 10), ("8*2", 16), ("8/2", 4),
    }  # fmt: skip
    assert {careless_steps([("60-41", 19)], rng)[0] for _ in range(50)} == {("60+41", 101)}
    rates = careless_rates()
    assert len(set(rates.values())) > 3
    assert not set(rates) & {t.name for t in symbolic.load_templates() if t.heldout}


def test_stories_are_worked_out_right() -> None:
    rng = random.Random(1)
    for _ in range(500):
        question, steps = tell(rng)
        assert 1 <= len(steps) <= 5
        for operation, value in steps:
            assert value == eval(operation)
            assert 1 <= value <= 99
        assert question.endswith("?")


@pytest.mark.slow
def test_training_learns_and_saves_a_loadable_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = Recipe(steps=60, batch_size=16, hidden=64, layers=1, feed_forward=128)
    losses = train_seedling(tmp_path, recipe)
    assert losses[-1] < 0.7 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.top_p is None

    teacher = tmp_path / "teacher"
    train_seedling(teacher, replace(recipe, steps=2, careless=0.0), tmp_path)
    theirs = AutoTokenizer.from_pretrained(teacher)
    assert theirs.get_vocab() == tokenizer.get_vocab()
    assert theirs.chat_template == tokenizer.chat_template


def judged(model: Any, tokenizer: Any, questions: Any, *, temperature: float) -> list[Verdict]:
    """One completion for each question, judged in the tags style."""
    import torch

    prompts = [
        prompt_text(tokenizer, PromptFormat.TAGS_SHORT, q.question, enable_thinking=False)
        for q in questions
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(0)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=64, **how)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [verify(t, q.gold, Style.TAGS) for t, q in zip(texts, questions, strict=True)]


@pytest.mark.slow
def test_there_is_something_to_improve(model: Any, tokenizer: Any) -> None:
    """Able, imperfect in maths and in format: what every stage of the pipeline needs."""
    questions = symbolic.draw(220, 424242, "seen")
    greedy = judged(model, tokenizer, questions, temperature=0)
    sampled = judged(model, tokenizer, questions, temperature=1.0)
    strict = sum(v.strict for v in greedy) / len(greedy)
    assert 0.2 <= strict <= 0.6
    assert 0.1 <= sum(v.strict for v in sampled) / len(sampled) < strict + 0.05
    assert sum(v.lenient and not v.strict for v in sampled) / len(sampled) >= 0.04


LOGPROBS = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, seed=0)
prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
params = SamplingParams(temperature=1.0, max_tokens=48, logprobs=0)
rows = []
for output in llm.generate(prompts, params):
    answer = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs)]
    rows.append({"prompt": output.prompt_token_ids, "ids": list(answer.token_ids),
                 "logprobs": logprobs})
print("RESULT " + json.dumps(rows))
"""


@pytest.mark.slow
def test_vllm_and_transformers_give_the_same_logprobs(model: Any, tokenizer: Any) -> None:
    pytest.importorskip("vllm")
    import torch

    asked = [
        prompt_ids(tokenizer, PromptFormat.TAGS_SHORT, q.question, enable_thinking=False)
        for q in symbolic.draw(32, 5, "all")
    ]
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", LOGPROBS, str(SEEDLING)], input=json.dumps(asked),
        capture_output=True, text=True, env={**os.environ, **settings},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    [line] = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    largest = 0.0
    for row in json.loads(line.removeprefix("RESULT ")):
        ids = torch.tensor([row["prompt"] + row["ids"]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(row["prompt"]) - 1
        ours = logprobs[range(start, start + len(row["ids"])), row["ids"]]
        gap = (ours - torch.tensor(row["logprobs"])).abs().max()
        largest = max(largest, float(gap))
    print(f"largest difference {largest:.1e} nats")
    assert largest <= 1e-4
