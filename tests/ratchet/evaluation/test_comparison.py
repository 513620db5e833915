"""The comparison of variants on hand-made answers, and its verdict in words by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.config.run import EvaluateConfig
from ratchet.errors import UserError
from ratchet.evaluation.comparison import (
    Answers,
    Slice,
    Variant,
    adjust,
    compare_pair,
    format_gain,
    named_slice,
    slices,
    some_ks,
)
from ratchet.evaluation.comparison_result import device_seconds_between
from ratchet.evaluation.stats import mcnemar_exact, tango, wilson, wilson_mean
from ratchet.evaluation.variants import ballots, canonical
from ratchet.evaluation.verdict import (
    Outcome,
    Price,
    contamination,
    device_time,
    outcome_of,
    price_note,
)
from ratchet.store.schemas import read_table
from ratchet.store.store import Artifact, Store
from ratchet.words import points
from tasks.stages import compare as stage
from tests.support.made_up import artifact, context, question

SETTINGS = {
    "model": {"enable_thinking": False},
    "prompt": {"format": "tags"},
    "sampler": {"engine": "vllm", "max_completion_tokens": 64, "max_num_seqs": 8},
    "evaluate": {"samples": 0, "temperature": 1.0},
}
# per question: baseline, rl; '+' strict, '~' lenient only, '-' wrong, '?' no readable answer
MARKS = {
    "q1": "-+",
    "q2": "~+",
    "q3": "+-",
    "q4": "++",
    "q5": "?~",
    "q6": "-+",
    "q7": "?+",
    "q8": "~+",
}


def answers(variant: str, marks: dict[str, str], decoding: str = "greedy") -> list[dict[str, Any]]:
    """Rows of an eval table; a mark per sample."""
    return [
        {
            "question_id": name,
            "benchmark": "made-up",
            "variant": variant,
            "decoding": decoding,
            "sample_index": index,
            "band": "1",
            "text": f"{variant} says {mark}",
            "num_tokens": 10 if variant == "baseline" else 20,
            "truncated": mark == "?",
            "status": "parse_failure" if mark == "?" else "ok",
            "extracted": None if mark == "?" else "4",
            "strict": mark == "+",
            "lenient": mark in "+~",
        }
        for name, samples in marks.items()
        for index, mark in enumerate(samples)
    ]


def pick(marks: dict[str, str], position: int) -> dict[str, str]:
    return {name: both[position] for name, both in marks.items()}


def run(
    tmp_path: Path,
    variants: dict[str, list[dict[str, Any]]],
    questions: list[dict[str, Any]] | None = None,
    samples: int = 0,
    **manifests: dict[str, Any],
) -> tuple[Any, Path]:
    rows = questions or [
        question(name, role="test", band="hard" if name in ("q1", "q2") else "easy")
        for name in MARKS
    ]
    sources = [{"kind": "symbolic", "name": "made-up", "templates": "heldout"}]
    config = {"questions": {"test": sources}}
    inputs = {
        "questions": artifact(tmp_path / "q", "questions", {"questions": rows}, config=config)
    }
    for name, table in variants.items():
        fields = {"config": SETTINGS, "summary": {"verifier": "2-aa"}} | manifests.get(name, {})
        inputs[name] = artifact(tmp_path / name, "evaluate", {"eval": table}, **fields)
    ctx = context(tmp_path, inputs)
    return stage.run(ctx, evaluate=EvaluateConfig(samples=samples)), ctx.out_dir


def both_variants(**changes: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    variants = {
        "rl": answers("rl", pick(MARKS, 1)),
        "baseline": answers("baseline", pick(MARKS, 0)),
    }
    return variants | changes


def test_the_table_holds_the_hand_counted_figures(tmp_path: Path) -> None:
    shuffled = both_variants()["rl"][::-1]  # the order of rows must not matter
    result, out = run(tmp_path, both_variants(rl=shuffled))
    rows = {
        (row["metric"], row["band"]): row
        for row in read_table(out / "comparison.parquet", "comparison").to_pylist()
    }
    assert set(rows) == {(m, b) for m in ("strict", "lenient") for b in ("all", "hard", "easy")}
    strict = rows["strict", "all"]
    assert (strict["variant_a"], strict["variant_b"]) == ("baseline", "rl")
    assert (strict["value_a"], strict["value_b"]) == (2 / 8, 6 / 8)
    assert (strict["gained"], strict["lost"]) == (5, 1)
    assert strict["p_value"] == pytest.approx(2 * (6 + 1) / 2**6)
    assert (strict["difference"], strict["p_adjusted"]) == (0.5, strict["p_value"])
    assert (strict["ci_low"], strict["ci_high"]) == tango(5, 1, 8)
    lenient = rows["lenient", "all"]
    assert (lenient["value_a"], lenient["value_b"]) == (4 / 8, 7 / 8)
    assert (lenient["gained"], lenient["lost"]) == (4, 1)
    assert rows["lenient", "hard"]["num_questions"] == 2
    assert rows["lenient", "hard"]["difference"] == 0.5

    variant = next(row for row in result.summary["variants"] if row["variant"] == "baseline")
    assert (variant["strict_low"], variant["strict_high"]) == wilson(2, 8)
    assert variant["status_rates"] == {"ok": 6 / 8, "parse_failure": 2 / 8}
    assert (variant["truncated_share"], variant["mean_tokens"]) == (2 / 8, 10.0)


def test_changed_answers_are_listed_with_both_completions(tmp_path: Path) -> None:
    result, out = run(tmp_path, both_variants())
    changed = [
        json.loads(line) for line in (out / "changed_answers.jsonl").read_text().splitlines()
    ]
    found = {(one["question_id"], one["change"], one["what"]) for one in changed}
    assert found == {
        ("q1", "improved", "maths"),
        ("q5", "improved", "maths"),
        ("q6", "improved", "maths"),
        ("q7", "improved", "maths"),
        ("q2", "improved", "format"),
        ("q8", "improved", "format"),
        ("q3", "regressed", "maths"),
    }
    assert changed[0]["a"]["text"] == "baseline says -"
    assert changed[0]["b"]["text"] == "rl says +"
    assert result.summary["changed_answers"] == [
        {
            "variant_a": "baseline",
            "variant_b": "rl",
            "improved_maths": 4,
            "improved_format": 2,
            "regressed_maths": 1,
            "regressed_format": 0,
        }
    ]


def test_the_verdict_is_one_line_and_says_what_happened(tmp_path: Path) -> None:
    warm = answers("warmstart", pick(MARKS, 0))
    result, out = run(tmp_path, both_variants(warmstart=warm))
    verdict = result.summary["verdict"]
    assert (out / "verdict.txt").read_text() == verdict + "\n"
    about = "made-up (templates never trained on)"
    assert verdict.startswith(f"inside the noise: {about} 25.0% → 75.0% strict, +50.0 points (95%")
    assert "RL is not told apart from the warm start: +50.0 points" in verdict
    assert "the smallest true difference this test finds 4 times in 5 is" in verdict
    assert result.summary["variant_order"] == ["baseline", "warmstart", "rl"]
    assert result.summary["outcome"] == "inside the noise"


def test_a_clear_gain_is_split_into_maths_and_format(tmp_path: Path) -> None:
    names = [f"q{index}" for index in range(60)]
    rows = [question(name, role="test", band="all") for name in names]
    # 20 wrong → right, 20 right in another format → right, 20 unchanged
    base = dict(zip(names, "-" * 20 + "~" * 20 + "+" * 20, strict=True))
    rl = dict.fromkeys(names, "+")
    variants = {"baseline": answers("baseline", base), "rl": answers("rl", rl)}
    result, out = run(tmp_path, variants, rows)
    assert result.summary["outcome"] == "better"
    assert "of +66.7 points, +33.3 are maths" in result.summary["verdict"]
    assert "+33.3 are format" in result.summary["verdict"]
    table = read_table(out / "comparison.parquet", "comparison")
    assert table.column("band").to_pylist() == ["all", "all"]


def test_sampled_answers_are_compared_by_question(tmp_path: Path) -> None:
    sampled_a = dict.fromkeys(MARKS, "+-") | {"q1": "--"}
    sampled_b = dict.fromkeys(MARKS, "++") | {"q1": "--", "q2": "-+"}
    variants = both_variants()
    variants["baseline"] += answers("baseline", sampled_a, "sampled")
    variants["rl"] += answers("rl", sampled_b, "sampled")
    settings = {"config": SETTINGS | {"evaluate": {"samples": 2, "temperature": 1.0}}}
    result, out = run(tmp_path, variants, samples=2, rl=settings, baseline=settings)
    row = next(
        row
        for row in read_table(out / "comparison.parquet", "comparison").to_pylist()
        if (row["decoding"], row["metric"], row["band"]) == ("sampled", "strict", "all")
    )
    assert (row["value_a"], row["value_b"]) == (7 / 16, 13 / 16)
    assert (row["gained"], row["lost"]) == (6, 0)
    variant = next(r for r in result.summary["variants"] if r["decoding"] == "sampled")
    assert (variant["strict_low"], variant["strict_high"]) == wilson_mean([0.5] * 7 + [0.0])
    at_k = {(item["kind"], item["k"]): item for item in variant["at_k"]}
    # samples '+-' and '--': pass@2 7/8; the two answers tie wherever one is right
    assert {name: item["value"] for name, item in at_k.items()} == {
        ("pass", 1): 7 / 16, ("pass", 2): 7 / 8, ("cons", 1): 7 / 16, ("cons", 2): 7 / 16,
    }  # fmt: skip
    item = at_k["pass", 2]
    assert (item["low"], item["high"]) == wilson_mean([1.0] * 7 + [0.0])
    rows = read_table(out / "comparison.parquet", "comparison").to_pylist()
    both = next(
        r for r in rows if (r["decoding"], r["metric"], r["band"]) == ("sampled", "pass@2", "all")
    )
    assert (both["value_a"], both["value_b"], both["gained"], both["lost"]) == (7 / 8, 7 / 8, 0, 0)
    assert some_ks(8) == [1, 2, 4, 8]
    assert some_ks(6) == [1, 2, 4, 6]


def test_variants_that_do_not_match_are_refused(tmp_path: Path) -> None:
    other = answers("rl", {**pick(MARKS, 1), "q9": "+"})
    cases: dict[str, tuple[list[dict[str, Any]], str]] = {
        "missing": (answers("rl", pick(MARKS, 1))[1:], r"'rl' holds 7 of 8 greedy answers"),
        "twice": (both_variants()["rl"] + both_variants()["rl"][:1], r"'rl' holds 8 of 8 greedy"),
        "other": (other, r"'rl' answered 1 questions that are not in the test set"),
        "sampled": (both_variants()["rl"] + answers("rl", pick(MARKS, 1), "sampled"), "expected"),
    }
    for name, (rows, message) in cases.items():
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=message):
            run(tmp_path / name, both_variants(rl=rows))


def test_other_conditions_are_refused_in_one_line(tmp_path: Path) -> None:
    def config(section: str, **changes: Any) -> dict[str, Any]:
        return {"config": SETTINGS | {section: SETTINGS[section] | changes}}

    cases: dict[str, tuple[dict[str, Any], str]] = {
        "prompt": (
            config("prompt", format="boxed"),
            r"different prompt formats \(tags and boxed\)",
        ),
        "text": ({"fingerprints": {"prompt": "bb"}}, "different texts of the prompt format"),
        "limit": (config("sampler", max_completion_tokens=32), r"token limits \(64 and 32\)"),
        "engine": (config("sampler", engine="transformers"), "different engines"),
        "thinking": (config("model", enable_thinking=True), "different settings of thinking"),
        "samples": (config("evaluate", samples=4), r"numbers of samples \(0 and 4\)"),
        "verifier": ({"summary": {"verifier": "2-bb"}}, r"verifiers \(2-aa and 2-bb\)"),
        "code": ({"code_version": "0ther"}, "different versions of the code"),
    }
    for name, (fields, message) in cases.items():
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=message) as refused:
            run(tmp_path / name, both_variants(), rl=fields)
        assert "\n" not in str(refused.value)
    # what can't change an answer is no reason
    (tmp_path / "fine").mkdir()
    run(tmp_path / "fine", both_variants(), rl=config("sampler", max_num_seqs=99))


def test_a_question_without_a_band_and_a_band_without_a_question(tmp_path: Path) -> None:
    rows = [question(name, role="test", band="" if name == "q3" else "easy") for name in MARKS]
    with pytest.raises(UserError, match="1 test questions have an empty band, the first is q3"):
        run(tmp_path, both_variants(), rows)
    parts = list(slices(["a", "a", "b"], ["1", "2", "1"]))
    assert [(part.benchmark, part.band) for part in parts] == [
        ("a", "all"), ("a", "1"), ("a", "2"), ("b", "all"),
    ]  # fmt: skip
    assert named_slice(parts, "a", "2").rows_q.tolist() == [False, True, False]
    with pytest.raises(UserError, match="band '9' of a holds no question: its bands are all, 1, 2"):
        named_slice(parts, "a", "9")
    with pytest.raises(UserError, match="no question belongs to benchmark 'c': there are a, b"):
        named_slice(parts, "c", "all")


def test_votes_are_counted_by_answer() -> None:
    found = ballots(["4", "7", "7.0", None, " 7", "x+1", "X + 1"], [True] + [False] * 6)
    assert found == [0, 1, 1, -1, 1, 2, 2]
    assert [canonical(text) for text in ("1,000", "2/4", "0.50", "1/0", "1e999999999")] == [
        "1000", "1/2", "1/2", "1/0", "1e999999999",
    ]  # fmt: skip


def test_bands_are_adjusted_together_and_benchmarks_are_not() -> None:
    rows: list[dict[str, Any]] = [
        {"benchmark": "a", "band": band, "p_value": p, "p_adjusted": p}
        for band, p in (("all", 0.04), ("1", 0.01), ("2", 0.04), ("3", 0.03))
    ] + [{"benchmark": "b", "band": "1", "p_value": 0.02, "p_adjusted": 0.02}]
    adjust(rows)
    assert [row["p_adjusted"] for row in rows] == pytest.approx([0.04, 0.03, 0.06, 0.06, 0.02])


def make_variant(name: str, strict_q: np.ndarray, lenient_q: np.ndarray) -> Variant:
    zeros = np.zeros((len(strict_q), 1), dtype=int)
    found = Answers(
        strict_q[:, None], lenient_q[:, None], zeros > 0, zeros.astype(str), zeros, zeros
    )
    return Variant(name, {"greedy": found})


def simulate(rng: np.random.Generator, n: int, gain: float) -> Outcome:
    """Outcome for two variants with 15% of answers flipping at random and a true gain on top."""
    lenient_a = rng.random(n) < 0.5
    draw = rng.random(n)
    gained, lost = 0.15 + gain, 0.15 - gain  # chance of a flip where it is possible
    lenient_b = np.where(lenient_a, draw >= lost, draw < gained)
    in_format = rng.random((2, n)) < 0.9
    a = make_variant("a", lenient_a & in_format[0], lenient_a)
    b = make_variant("b", lenient_b & in_format[1], lenient_b)
    part = Slice("made-up", "all", np.ones(n, dtype=bool))
    strict, lenient = (
        compare_pair(a, b, metric, "greedy", part, 0.95, 0) for metric in ("strict", "lenient")
    )
    assert strict["p_value"] == mcnemar_exact(strict["gained"], strict["lost"])
    return outcome_of(strict, lenient, 0.95)


def test_equal_variants_are_inside_the_noise_and_a_planted_gain_is_found() -> None:
    rng = np.random.default_rng(7)
    equal = [simulate(rng, 1319, 0.0) for _ in range(100)]
    assert equal.count(Outcome.NOISE) >= 95
    better = [simulate(rng, 1319, 0.06) for _ in range(100)]
    assert sum(found in (Outcome.BETTER, Outcome.BETTER_FORMAT) for found in better) >= 95


def test_format_gain_is_the_strict_gain_that_the_lenient_score_lacks() -> None:
    yes, no = np.array([True, True, True, True]), np.array([False, True, False, False])
    a, b = make_variant("a", no, yes), make_variant("b", yes, yes)
    part = Slice("made-up", "all", np.ones(4, dtype=bool))
    assert format_gain(a, b, "greedy", part, 0.95, 0)["difference"] == 0.75


def test_points_are_signed_and_never_minus_zero() -> None:
    assert [points(value) for value in (0.0123, -0.05, -0.0001)] == ["+1.2", "−5.0", "+0.0"]


def moved(benchmark: str, gained: int, lost: int, n: int, **fields: Any) -> dict[str, Any]:
    """A row of the comparison table."""
    low, high = tango(gained, lost, n)
    p = mcnemar_exact(gained, lost)
    row = {
        "benchmark": benchmark,
        "p_value": p,
        "p_adjusted": p,
        "variant_a": "a",
        "variant_b": "rl",
    }
    row["value_a"] = 0.4
    return row | {"difference": (gained - lost) / n, "ci_low": low, "ci_high": high} | fields


def test_a_gain_on_public_questions_alone_is_suspect() -> None:
    leaked, honest = moved("gsm8k", 200, 60, 1000), moved("gsm8k", 200, 60, 1000)
    (warning,) = contamination([leaked], [moved("fresh", 20, 22, 400)], 0.95)
    assert warning.startswith("gsm8k gains +14.0 points of lenient accuracy, fresh questions")
    assert "(fresh) −0.5: +14.5 apart" in warning
    assert not contamination([honest], [moved("fresh", 60, 20, 400)], 0.95)  # both gain
    assert not contamination([moved("gsm8k", 60, 60, 1000)], [moved("fresh", 20, 22, 400)], 0.95)
    # 14 points can't be gained from 95% on
    assert not contamination([leaked], [moved("fresh", 20, 22, 400, value_a=0.95)], 0.95)
    # no gain on 12 fresh questions says nothing: the gains' difference is inside the noise
    assert not contamination([leaked], [moved("fresh", 1, 1, 12)], 0.95)


def test_the_price_of_a_point() -> None:
    row = moved("gsm8k", 70, 30, 400)
    assert price_note(row, Price("warmstart", 7200.0), 0.95) == (
        "RL took 2 device-hours beyond the warm start for +10.0 points: 0.2 device-hours per point"
    )
    assert price_note(moved("gsm8k", 30, 31, 400), Price("baseline", 90.0), 0.95) == (
        "RL took 90 device-seconds beyond the starting model and gained nothing that stands out "
        "from the noise"
    )
    assert [device_time(seconds) for seconds in (12.345, 5400.0)] == [
        "12.3 device-seconds", "1.5 device-hours",
    ]  # fmt: skip


def test_the_price_counts_what_only_the_later_variant_needed(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def made(stage: str, key: str, seconds: float, *parents: Artifact) -> Artifact:
        fields = {"key": key, "device_seconds": seconds}
        names = {f"{p.manifest.stage}": p.as_parent() for p in parents}
        written = artifact(tmp_path / ".x", stage, {}, parents=names, **fields).manifest
        with store.build(stage, key) as build:
            (build.out_dir / "content").write_text(key)
            return store.commit(build, written)

    model = made("model", "m", 1.0)
    presample = made("presample", "p", 20.0, model)
    warm = made("warmstart_sft", "w", 9.0, model, presample)
    grpo = made("grpo", "g", 70.0, warm, presample)

    def evaluated(of: Artifact) -> Artifact:
        parents = {"model": of.as_parent()}
        return artifact(tmp_path / ".e", "evaluate", {}, parents=parents, device_seconds=500.0)

    assert device_seconds_between(store, evaluated(warm), evaluated(grpo)) == 70.0
    assert device_seconds_between(store, evaluated(model), evaluated(grpo)) == 99.0
    assert device_seconds_between(store, evaluated(grpo), evaluated(model)) == 0.0
    (store.folder("presample", "p") / "manifest.json").unlink()
    assert device_seconds_between(store, evaluated(model), evaluated(grpo)) is None
