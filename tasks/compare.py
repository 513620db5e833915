"""Compare the arms on the held-out questions and say in words what was gained.

Arms are compared only if they answered the same questions, the same number of times, with the same
prompt, limits and verifier; anything else is an error. Benchmarks are reported apart: held-out
symbolic templates are a benchmark of their own. Flips list questions with both completions.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ratchet.comparison import (
    ALL_BANDS,
    METRICS,
    Answers,
    Arm,
    Slice,
    compare_arms,
    detectable,
    format_gain,
    slices,
)
from ratchet.config import EvaluateConfig, SourceKind
from ratchet.errors import UserError
from ratchet.flips import DECODING, count_flips, list_flips
from ratchet.store.store import Artifact
from ratchet.verdict import Verdict, judge, one_line, points
from tasks.context import StageContext, StageResult

if TYPE_CHECKING:
    import pyarrow as pa

ARM_ORDER = ("baseline", "warmstart", "rl")
SAME_SECTIONS = ("prompt", "sampler", "evaluate")
Row = dict[str, Any]


def arm_names(roles: list[str]) -> list[str]:
    """Arms from the first (what was started from) to the last (what is judged)."""
    names = [role for role in roles if role != "questions"]
    known = [name for name in ARM_ORDER if name in names]
    extra = sorted(set(names) - set(known))
    return known[:1] + extra + known[1:]


def check_same_conditions(arms: dict[str, Artifact]) -> None:
    """UserError unless all arms were evaluated with the same settings and code."""
    for (name_a, a), (name_b, b) in pairwise(arms.items()):
        for section in SAME_SECTIONS:
            if a.manifest.config[section] != b.manifest.config[section]:
                raise UserError(
                    f"arms '{name_a}' and '{name_b}' were evaluated with different '{section}' "
                    "settings: evaluate both again under one configuration"
                )
        if a.manifest.code_version != b.manifest.code_version:
            raise UserError(
                f"arms '{name_a}' and '{name_b}' were scored by different versions of the code: "
                "evaluate both again"
            )


def read_questions(artifact: Artifact) -> list[Row]:
    """The test questions, in the table's order. UserError when there are none."""
    columns = ["question_id", "source", "role", "question", "gold", "band"]
    rows = artifact.table("questions", columns).to_pylist()
    found = [row for row in rows if row["role"] == "test"]
    if not found:
        raise UserError("there are no test questions: add a source to questions.test")
    return found


def _grid(name: str, decoding: str, table: pa.Table, question_ids: pa.Array) -> pa.Table:
    """`table` sorted by question and sample, proven to hold every question equally often."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    row = pc.index_in(table.column("question_id"), value_set=question_ids)
    if row.null_count:
        raise UserError(
            f"arm '{name}' answered {row.null_count:,} questions that are not in the test set: "
            "compare arms that were evaluated on the same questions"
        )
    samples = pc.max(table.column("sample_index")).as_py() + 1
    place = row.to_numpy().astype(np.int64) * samples + table.column("sample_index").to_numpy()
    expected = len(question_ids) * samples
    held = len(np.unique(place))
    if held != expected or len(place) != expected:
        raise UserError(
            f"arm '{name}' holds {held:,} of {expected:,} {decoding} answers "
            f"({len(question_ids):,} questions × {samples}): evaluate it again"
        )
    return table.take(pa.array(np.argsort(place)))


def _answers(table: pa.Table, num_questions: int) -> Answers:
    def square(column: str) -> Any:
        values = table.column(column).to_numpy()
        return values.reshape(num_questions, -1)

    return Answers(
        strict_qs=square("strict").astype(bool),
        lenient_qs=square("lenient").astype(bool),
        truncated_qs=square("truncated").astype(bool),
        status_qs=square("status"),
        num_tokens_qs=square("num_tokens"),
    )


def read_arm(name: str, artifact: Artifact, question_ids: pa.Array) -> tuple[Arm, list[Row]]:
    """An arm's answers, and its greedy completions in the order of the questions.

    UserError when answers are missing, doubled or of other questions.
    """
    import pyarrow.compute as pc

    table = artifact.table("eval")
    answers: dict[str, Answers] = {}
    texts: list[Row] = []
    for decoding in sorted(pc.unique(table.column("decoding")).to_pylist()):
        part = table.filter(pc.equal(table.column("decoding"), decoding))
        grid = _grid(name, decoding, part, question_ids)
        answers[decoding] = _answers(grid, len(question_ids))
        if decoding == DECODING:
            columns = ["text", "extracted", "num_tokens", "strict", "lenient"]
            texts = grid.select(columns).to_pylist()
    if not texts:
        raise UserError(f"arm '{name}' holds no {DECODING} answers: evaluate it again")
    return Arm(name, answers), texts


def check_same_answers(arms: list[Arm], samples: int) -> None:
    """UserError unless all arms hold one greedy answer and `samples` sampled ones per question."""
    wanted = {DECODING: 1} | ({"sampled": samples} if samples else {})
    for arm in arms:
        held = {name: found.strict_qs.shape[1] for name, found in arm.answers.items()}
        if held != wanted:
            raise UserError(
                f"arm '{arm.name}' holds {held} answers per question, expected {wanted}: "
                "evaluate it again"
            )


def about_benchmarks(sources: list[Row]) -> dict[str, str]:
    """What a reader must know of a benchmark's questions, by label, from the test sources."""
    about = {
        "seen": "new numbers in templates of the training set",
        "heldout": "templates never trained on",
    }
    return {
        source["name"] or source["kind"]: about[source["templates"]]
        for source in sources
        if source["kind"] == SourceKind.SYMBOLIC and source["templates"] in about
    }


def judge_benchmarks(
    arms: list[Arm],
    compared: list[Row],
    parts: list[Slice],
    about: dict[str, str],
    confidence: float,
    seed: int,
) -> list[Verdict]:
    """One verdict per benchmark, in the order of the test questions; the first one leads."""

    def find(metric: str, benchmark: str, arm_a: str, arm_b: str) -> Row:
        wanted = (metric, DECODING, benchmark, ALL_BANDS, arm_a, arm_b)
        columns = ("metric", "decoding", "benchmark", "band", "arm_a", "arm_b")
        return next(row for row in compared if tuple(row[name] for name in columns) == wanted)

    first, last = arms[0], arms[-1]
    warm = next((arm for arm in arms[1:-1] if arm.name == "warmstart"), None)
    verdicts = []
    for part in parts:
        if part.band != ALL_BANDS:
            continue
        strict, lenient = (
            find(metric, part.benchmark, first.name, last.name) for metric in METRICS
        )
        verdicts.append(
            judge(
                strict,
                lenient,
                format_gain(first, last, DECODING, part, confidence, seed),
                find("strict", part.benchmark, warm.name, last.name) if warm else None,
                detectable(strict, confidence),
                confidence,
                about.get(part.benchmark, ""),
            )
        )
    return verdicts


def _markdown(verdict: str, described: list[Row], compared: list[Row]) -> str:
    lines = [f"**{verdict}**", "", "| benchmark | arm | strict | lenient | cut off | tokens |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in described:
        if row["band"] == ALL_BANDS and row["decoding"] == DECODING:
            lines.append(
                f"| {row['benchmark']} | {row['arm']} | {row['strict']:.3f} | "
                f"{row['lenient']:.3f} | {row['truncated_share']:.1%} | {row['mean_tokens']:.0f} |"
            )
    lines += ["", "| benchmark | arms | metric | points | interval | p | gained | lost |"]
    lines.append("|---|---|---|---:|---|---:|---:|---:|")
    for row in compared:
        if row["band"] == ALL_BANDS and row["decoding"] == DECODING:
            lines.append(
                f"| {row['benchmark']} | {row['arm_a']} → {row['arm_b']} | {row['metric']} | "
                f"{points(row['difference'])} | {points(row['ci_low'])} to "
                f"{points(row['ci_high'])} | {row['p_value']:.2g} | {row['gained']} | "
                f"{row['lost']} |"
            )
    return "\n".join(lines)


def run(ctx: StageContext, *, evaluate: EvaluateConfig) -> StageResult:
    """Write the comparison table, the flips and the verdict."""
    import pyarrow as pa

    names = arm_names(list(ctx.inputs))
    artifacts = {name: ctx.inputs[name] for name in names}
    check_same_conditions(artifacts)
    questions = read_questions(ctx.inputs["questions"])
    ids = pa.array([row["question_id"] for row in questions])
    read = [read_arm(name, artifact, ids) for name, artifact in artifacts.items()]
    arms = [arm for arm, _ in read]
    texts = {arm.name: found for arm, found in read}
    check_same_answers(arms, evaluate.samples)

    parts = list(slices([row["source"] for row in questions], [row["band"] for row in questions]))
    compared, described = compare_arms(arms, parts, evaluate.confidence, ctx.seed)
    about = about_benchmarks(ctx.inputs["questions"].manifest.config["questions"]["test"])
    verdicts = judge_benchmarks(arms, compared, parts, about, evaluate.confidence, ctx.seed)
    verdict = one_line(verdicts)

    flips = [row for arm in arms[:-1] for row in list_flips(arm, arms[-1], questions, texts)]
    ctx.write_table("comparison", compared)
    with (ctx.out_dir / "flips.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in flips)
    (ctx.out_dir / "verdict.txt").write_text(verdict + "\n", encoding="utf-8")
    summary = {
        "num_questions": len(questions),
        "verdict": verdict,
        "outcome": verdicts[0].outcome.value,
        "verdicts": [item.as_dict() for item in verdicts],
        "about": about,
        "arm_order": names,
        "arms": described,
        "flips": [count_flips(arm, arms[-1]) for arm in arms[:-1]],
        "num_flips_listed": len(flips),
        "confidence": evaluate.confidence,
    }
    return StageResult(summary=summary, markdown=_markdown(verdict, described, compared))
