"""The benchmark: what it counts, what it says, what it refuses; thinking and a model's sampling."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.cli.benchmark import prepare_benchmark
from ratchet.config.run import BenchmarkConfig, ModelConfig, PromptFormat
from ratchet.diagnostics.format_words import places_in_short, sentences
from ratchet.errors import UserError
from ratchet.models.check import SEEDLING, packaged_model_dir
from ratchet.pipeline.request import Request
from ratchet.prompts.thinking import check_thinking, has_switch
from ratchet.store.runs import RunRecord
from ratchet.store.store import Artifact
from tasks.sampling.decoding import GREEDY, own_decoding
from tasks.sampling.engines import Shaping
from tasks.sampling.sample import Sampled
from tasks.stages import benchmark
from tasks.stages.benchmark import Setting, measure
from tests.support.made_up import artifact, question
from tests.support.tiny_model import tiny_tokenizer
from tests.tasks.sampling.test_shards import ALONE, PROMPT, SAMPLER, rows, stage_context

MODEL = ModelConfig(path=SEEDLING)
TAGGED = "<start_working_out>\n2+2=4\n<end_working_out>\n<SOLUTION>4</SOLUTION>"
SWITCH = "{% if add_generation_prompt and enable_thinking %}<think>{% endif %}"


def row(name: str, strict: float, lenient: float, **fields: Any) -> dict[str, Any]:
    """A row of table 'benchmark' with intervals of 5 points either side."""
    places = fields.pop("places", {})
    return {
        "prompt_format": name,
        "thinking": "off",
        "decoding": "greedy",
        "strict": strict,
        "strict_low": strict - 0.05,
        "strict_high": strict + 0.05,
        "lenient": lenient,
        "truncated_share": 0.0,
        "mean_tokens": 100.0,
        "answers_elsewhere": json.dumps(places),
    } | fields


def test_places_that_round_to_no_percent_are_left_out() -> None:
    places = {"boxed": 0.97, "number": 0.01, "none": 1 / 200, "tags": 0.001}
    tags = row("tags", 0.02, 0.80, places=places)
    assert places_in_short(tags) == "97% boxed, 1% bare"
    assert (
        "answers stood 97% in \\boxed{}, 1% as a bare number."
        in sentences([tags], "tags", False)[0]
    )
    few = row("tags", 0.02, 0.80, places={"none": 1 / 200})
    assert places_in_short(few) == ""
    assert "in the right place but not in the exact format" in sentences([few], "tags", False)[0]


def test_a_format_that_fails_is_told_from_maths_that_fails_with_what_fixes_it() -> None:
    rows = [
        row("tags", 0.06, 0.80, places={"boxed": 0.97}),
        row("tags_example", 0.76, 0.77, places={"boxed": 0.01}),
        row("boxed", 0.30, 0.30, truncated_share=0.4),
    ]
    tags, example, boxed, advice = sentences(rows, "tags", own_thinking=False)
    assert tags == (
        "tags: 6.0% right in the demanded format, 80.0% right anywhere: the format, not the "
        "maths, costs 74 points; instead of the demanded place, answers stood 97% in \\boxed{}. "
        "tags_example gives back 70 of 74: 76.0% (71.0 to 81.0) strict against 6.0% (1.0 to 11.0), "
        "clear beyond the intervals."
    )
    assert example.endswith(
        "77.0% right anywhere; the answers stand where they should, so what fails is the maths."
    )
    assert "costs" not in boxed
    assert boxed.endswith("40% of the completions were cut off.")
    assert advice == (
        "tags_example gets 76.0% strictly right, the run's tags 6.0%: consider prompt.format = "
        "'tags_example'."
    )
    assert len(sentences(rows, "tags_example", own_thinking=False)) == 3
    last = sentences(rows, "hash_short", own_thinking=False)[-1]
    assert last.endswith("hash_short, was not measured.")


def test_what_is_not_clear_is_called_so() -> None:
    near = [row("tags", 0.30, 0.40), row("boxed", 0.39, 0.39)]
    words = sentences(near, "tags", own_thinking=False)
    assert words[2:] == [
        "boxed got most, 39.0% (34.0 to 44.0) strict against 30.0% (25.0 to 35.0) of the run's "
        "tags, but the intervals meet: raise benchmark.limit before you change prompt.format."
    ]
    assert words[0].endswith(
        "boxed gives back 9 of 10: 39.0% (34.0 to 44.0) strict against 30.0% (25.0 to 35.0), but "
        "the intervals meet: ask more questions before you count on it."
    )
    whole = sentences([row("tags", 0.30, 0.40), row("boxed", 0.60, 0.60)], "boxed", False)[0]
    assert "boxed closes the gap: 60.0%" in whole
    worse = sentences([row("tags", 0.30, 0.40), row("boxed", 0.10, 0.10)], "tags", False)[0]
    assert "No measured format does better; the best other, boxed, gets 10.0%" in worse
    assert sentences([row("tags", 0.3, 0.4)], "tags", False)[0].endswith(
        "No other format was measured."
    )


def test_thinking_and_sampling_are_told_apart_from_formats() -> None:
    rows = [
        row("tags", 0.50, 0.60),
        row("tags", 0.80, 0.80, thinking="on", mean_tokens=900.0),
        row("tags", 0.45, 0.55, decoding="model"),
        row("boxed", 0.58, 0.58, decoding="model"),
    ]
    words = sentences(rows, "tags", own_thinking=False)
    # the format of another decoding or with thinking is no fix of this one
    assert words[0].endswith("No other format was measured.")
    assert "boxed closes the gap" in words[2]
    assert words[4:] == [
        "tags, with thinking: 80.0% (75.0 to 85.0) strict against 50.0% (45.0 to 55.0) without, at "
        "900 tokens against 100; clear beyond the intervals.",
        "With its own sampling or without makes no clear difference to tags.",
        "tags + thinking gets 80.0% strictly right, the run's tags 50.0%: consider prompt.format = "
        "'tags' and model.enable_thinking = true.",
    ]


def sampled(texts: list[str], reasons: list[str]) -> Sampled:
    """Completions, each ten times as many tokens as the one before."""
    table = pa.table(
        {
            "text": texts,
            "finish_reason": reasons,
            "num_tokens": [10**index for index in range(len(texts))],
        }
    )
    return Sampled(
        table, num_shards=1, num_reused=0, new_tokens=0, generate_seconds=0.0, wall_seconds=0.0
    )


def test_only_what_follows_a_thought_is_scored() -> None:
    texts = [
        "<think>2+2=5, \\boxed{5}</think>\n" + TAGGED,
        "<think>Let me see. <SOLUTION>4</SOLUTION> seems",
        "<think>#### 5</think>The answer is 4",
        "<think>5</think>\n\\boxed{4}",
    ]
    setting = Setting(PromptFormat.TAGS, "on", GREEDY)
    answers = sampled(texts, ["stop", "length", "stop", "stop"])
    found, verdicts = measure(setting, [question(f"q{i}") for i in range(4)], answers, "")
    assert [(v.strict, v.lenient) for v in verdicts] == [
        (True, True), (False, False), (False, True), (False, True),
    ]  # fmt: skip
    assert (found["thinking"], found["strict"], found["lenient"]) == ("on", 0.25, 0.75)
    assert found["strict_low"] == pytest.approx(0.0456, abs=1e-4)  # Wilson, 1 of 4
    assert found["strict_high"] == pytest.approx(0.6994, abs=1e-4)
    assert (found["parse_failure_rate"], found["truncated_share"]) == (0.25, 0.25)
    assert found["mean_tokens"] == 1111 / 4
    places = {"thought": 0.25, "number": 0.25, "boxed": 0.25}
    assert json.loads(found["answers_elsewhere"]) == places


def test_a_thought_that_the_template_opened_is_no_answer() -> None:
    """The template wrote `<think>`, so the completion starts inside the thought."""
    setting = Setting(PromptFormat.TAGS, "on", GREEDY)
    answers = sampled(["2+2 is 4", "2+2 is 5</think>" + TAGGED], ["length", "stop"])
    asked = [question("q0"), question("q1")]
    found, verdicts = measure(setting, asked, answers, "<think>")
    assert [verdict.status.value for verdict in verdicts] == ["parse_failure", "ok"]
    assert (found["strict"], found["lenient"]) == (0.5, 0.5)
    unaware, _ = measure(setting, asked, answers, "")
    assert unaware["lenient"] == 1.0, "what the prefilled tag is for"


def test_thinking_needs_a_template_with_the_switch() -> None:
    plain = tiny_tokenizer()
    assert not has_switch(plain, PromptFormat.TAGS)
    with pytest.raises(
        UserError, match=r"benchmark\.thinking asks for .* doesn't know enable_think"
    ):
        check_thinking(plain, PromptFormat.TAGS, "benchmark.thinking")
    switched = tiny_tokenizer()
    switched.chat_template += SWITCH
    check_thinking(switched, PromptFormat.TAGS, "benchmark.thinking")
    lost = tiny_tokenizer(("</think>",))  # a special token, which decoding drops
    lost.chat_template += SWITCH
    with pytest.raises(UserError, match="drops </think> as a special token"):
        check_thinking(lost, PromptFormat.TAGS, "model.enable_thinking")


def thinker(folder: Path, **sampling: Any) -> Artifact:
    """The seedling with a chat template that opens a thought when asked to, and with sampling
    settings in its generation config."""
    copy = folder / "weights"
    shutil.copytree(packaged_model_dir(SEEDLING), copy, copy_function=shutil.copyfile)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + SWITCH)
    config = json.loads((copy / "generation_config.json").read_text()) | sampling
    (copy / "generation_config.json").write_text(json.dumps(config))
    facts = {"path": str(copy), "revision": None, "context": 256}
    (folder / "model.json").write_text(json.dumps(facts))
    return artifact(folder, "model", {}, key="thinker")


def test_a_models_own_sampling(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    found = own_decoding(thinker(tmp_path / "a", **said))
    assert (found.temperature, found.shaping) == (0.6, Shaping(top_p=0.95, top_k=20))
    with pytest.raises(UserError, match=r"names no temperature, top_p, top_k or min_p: leave 'gr"):
        own_decoding(thinker(tmp_path / "b"))
    with pytest.raises(UserError, match="leave 'greedy'"):
        own_decoding(thinker(tmp_path / "c", do_sample=False, temperature=0.6))


@pytest.mark.slow
def test_one_table_of_formats_thinking_and_decoding(tmp_path: Path) -> None:
    questions = rows(8, "dev") + rows(4, "test", seed=9)
    ctx = stage_context(tmp_path, "a", questions)
    (tmp_path / "thinker").mkdir()
    model = thinker(tmp_path / "thinker", do_sample=True, temperature=1.5, top_k=3, min_p=0.1)
    ctx = replace(ctx, inputs=dict(ctx.inputs) | {"model": model})
    asked = BenchmarkConfig(
        formats=(PromptFormat.TAGS_SHORT, PromptFormat.HASH_SHORT),
        thinking=(False, True),
        decoding=("greedy", "model"),
    )
    given = {"model": MODEL, "prompt": PROMPT, "sampler": SAMPLER, "workers": ALONE}
    result = benchmark.run(ctx, benchmark=asked, **given)
    found = artifact(ctx.out_dir, "benchmark", {}).table("benchmark").to_pylist()
    assert [(r["prompt_format"], r["thinking"], r["decoding"]) for r in found] == [
        (prompt_format, thinking, decoding)
        for prompt_format in ("tags_short", "hash_short")
        for thinking in ("off", "on")
        for decoding in ("greedy", "model")
    ]
    assert {r["num_questions"] for r in found} == {8}
    shaped = {(r["temperature"], r["top_p"], r["top_k"], r["min_p"]) for r in found}
    assert shaped == {(0.0, 1.0, 0, 0.0), (1.5, 1.0, 3, 0.1)}
    for r in found:  # it knows no </think>, so a thought that the template opened never ends
        if r["thinking"] == "on":
            assert (r["lenient"], r["parse_failure_rate"]) == (0.0, 1.0)
            assert json.loads(r["answers_elsewhere"]) == {"thought": 1.0}
    assert sum(r["lenient"] for r in found if r["thinking"] == "off") > 0
    shards = [made for made in ctx.store.artifacts() if made.manifest.stage == "samples"]
    assert len(shards) == 8, "every setting has completions of its own"
    tables = [shard.table("completions").to_pylist()[0] for shard in shards]
    kept = {(r["temperature"], r["top_k"], r["min_p"], r["repetition_penalty"]) for r in tables}
    assert kept == {(0.0, 0, 0.0, 1.0), (1.5, 3, 0.1, 1.0)}
    assert "; own sampling: temperature 1.5, top_k 3, min_p 0.1." in result.markdown
    assert "| tags_short + thinking + own sampling | 0.0 (0.0 to 32.4) |" in result.markdown
    assert len(result.summary["formats"]) == 8

    again = replace(ctx, out_dir=tmp_path / "again")
    again.out_dir.mkdir()
    one = BenchmarkConfig(formats=(PromptFormat.TAGS_SHORT,), role="test", source="other")
    tested = benchmark.run(again, benchmark=one, **given)
    assert tested.summary["sources"] == {"other": 2}
    assert tested.summary["words"][-1] == benchmark.NOTE_ON_TEST
    assert "thinking: off; greedy" in tested.markdown


def test_what_cannot_be_measured_is_refused_before_an_engine_opens(tmp_path: Path) -> None:
    ctx = stage_context(tmp_path, "a", rows(4, "dev"))
    given = {"model": MODEL, "prompt": PROMPT, "sampler": SAMPLER, "workers": ALONE}
    cases = {
        r"no test questions .* widen questions\.test": {"role": "test"},
        r"'gsm8k' is no source of the dev questions: they come from other, symbolic": {
            "source": "gsm8k"
        },
        r"benchmark\.thinking asks for thinking": {"thinking": (True,)},
        r"benchmark\.decoding = 'model' needs": {"decoding": ("greedy", "model")},
    }
    for message, asked in cases.items():
        with pytest.raises(UserError, match=message):
            benchmark.run(ctx, benchmark=BenchmarkConfig(**asked), **given)
    thinking = given | {"model": MODEL.model_copy(update={"enable_thinking": True})}
    with pytest.raises(UserError, match=r"model\.enable_thinking asks for thinking"):
        benchmark.run(ctx, benchmark=BenchmarkConfig(), **thinking)
    assert not list(ctx.store.artifacts())


def test_the_command_asks_for_the_measuring_alone(tmp_path: Path) -> None:
    def prepared(*assignments: str) -> RunRecord:
        wanted = Request("demo", None, list(assignments), None, None, tmp_path)
        return prepare_benchmark(wanted, force=False, command="ratchet benchmark")

    record = prepared("benchmark.thinking=[false,true]", 'benchmark.decoding=["model"]')
    assert (record.name, record.targets) == ("demo-benchmark", ["benchmark"])
    assert record.config["benchmark"]["thinking"] == [False, True]
    assert prepared("questions.dev=[]", "benchmark.role=test").targets == ["benchmark"]
    with pytest.raises(UserError, match=r"questions\.dev is empty: add a source"):
        prepared("questions.dev=[]")
