"""A whole run of artifacts from simulated answers. Not a test module.

Only what needs a model is made up (completions, training logs); scoring, filter and comparison are
the real stages run on it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ratchet.config.run import (
    EvaluateConfig,
    FilterConfig,
    GrpoConfig,
    PromptConfig,
    PromptFormat,
    RewardsConfig,
    RolloutsConfig,
)
from ratchet.store.store import Artifact
from tasks.runtime.context import StageContext
from tasks.stages import compare, filter, score
from tasks.stages import rollouts as rollouts_stage
from tests.support.made_up import Rows, artifact, context, question

PROMPT = PromptConfig(format=PromptFormat.TAGS)
SETTINGS = {
    "model": {"path": "seedling", "revision": None, "dtype": "float32"},
    "prompt": {"format": "tags"},
    "sampler": {"engine": "vllm", "max_completion_tokens": 64},
    "evaluate": {"samples": 0, "confidence": 0.95},
    "questions": {
        "test": [
            {"kind": "symbolic", "name": None, "templates": "seen"},
            {"kind": "symbolic", "name": "symbolic-heldout", "templates": "heldout"},
        ]
    },
}
HOSTILE = "<script>alert('x')</script>\n**not bold** <img src=x onerror=alert(1)>"
BANDS = ("1", "2", "3", "4")
GROUP, STEPS, PROMPTS = 8, 40, 8


def completion(draw: random.Random, gold: int, right: float, tidy: float) -> str:
    """A completion that is right and in the format with these chances."""
    answer = gold if draw.random() < right else gold + draw.randint(1, 9)
    working = f"First {gold} - 2 = {gold - 2}, then {gold - 2} + 2 = {answer}."
    if draw.random() < tidy:
        return f"<start_working_out>\n{working}\n<end_working_out>\n<SOLUTION>{answer}</SOLUTION>"
    if draw.random() < 0.15:
        return working.partition(",")[0] + " and so"
    return f"{working}\nThe answer is {answer}."


def questions(draw: random.Random, role: str, source: str, number: int) -> Rows:
    """Questions with bands of difficulty."""
    rows = []
    for index in range(number):
        gold = draw.randint(5, 60)
        text = f"Mara has {gold - 2} marbles and finds 2 more. How many now? ({source} {index})"
        steps = f"{gold - 2} - 1 = <<{gold - 2}-1={gold - 3}>>{gold - 3}\n#### {gold}"
        band = BANDS[index % 4]
        rows.append(
            question(
                f"{source}-{role}-{index}",
                role=role,
                source=source,
                question=text,
                gold=str(gold),
                band=band,
                difficulty=float(band),
                reference_solution=steps,
            )
        )
    return rows


def contaminated(heldout: dict[str, Any]) -> dict[str, Any]:
    """A training question that was dropped, with text that must be shown as text."""
    return {
        "question_id": "gone",
        "role": "train",
        "source": "symbolic",
        "question": f"What is {HOSTILE}?",
        "rule": "shared words",
        "shared": "marbles and finds 2 more",
        "heldout_id": heldout["question_id"],
        "heldout_role": "test",
        "heldout_source": heldout["source"],
        "heldout_question": heldout["question"],
    }


def skill(row: dict[str, Any], level: float) -> float:
    """Chance of a right answer: falls with difficulty."""
    return max(0.0, min(1.0, level - 0.22 * (float(row["band"]) - 1)))


def completions(draw: random.Random, rows: Rows, k: int, level: float, tidy: float) -> Rows:
    """A completions table."""
    found = []
    for row in rows:
        talent = draw.choice((0.0, 0.6, 1.0, 1.3))
        for index in range(k):
            text = completion(draw, int(row["gold"]), skill(row, level) * talent, tidy)
            found.append(
                {
                    "question_id": row["question_id"],
                    "sample_index": index,
                    "prompt_format": "tags",
                    "text": text,
                    "token_ids": [1],
                    "num_tokens": len(text) // 4,
                    "finish_reason": "length" if text.endswith("so") else "stop",
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "max_tokens": 64,
                    "seed": 0,
                    "model_key": "m",
                }
            )
    return found


def evaluated(
    draw: random.Random,
    rows: Rows,
    variant: str,
    level: float,
    tidy: float,
    sample: int | None = None,
) -> Rows:
    """An eval table, judged by the real verifier: greedy, or one sample of each question."""
    from ratchet.verifier import verify

    found = []
    for position, row in enumerate(rows):
        lift = 0.0 if row["source"] == "symbolic" or variant == "baseline" else -0.25
        text = completion(draw, int(row["gold"]), skill(row, level + lift), tidy)
        if variant == "rl" and position < 3 and sample is None:
            text = text.replace("First", HOSTILE + " First")
        verdict = verify(text, row["gold"], "tags")
        found.append(
            {
                "question_id": row["question_id"],
                "benchmark": row["source"],
                "variant": variant,
                "decoding": "greedy" if sample is None else "sampled",
                "sample_index": sample or 0,
                "band": row["band"],
                "text": text,
                "num_tokens": len(text) // 4,
                "truncated": text.endswith("so"),
                "status": verdict.status.value,
                "extracted": verdict.extracted,
                "strict": verdict.strict,
                "lenient": verdict.lenient,
            }
        )
    return found


def training(draw: random.Random) -> tuple[Rows, Rows]:
    """(metrics, rollouts) of a run whose reward saturates."""
    metrics, rollouts = [], []
    for step in range(1, STEPS + 1):
        gain = 1 - 0.93**step
        noise = draw.gauss(0, 0.03)
        metrics.append(
            {
                "step": step,
                "loss": draw.gauss(0, 0.01),
                "grad_norm": 0.3,
                "reward": 2.6 + 2.0 * gain + 4 * noise,
                "rewards/exact_check/mean": 0.35 + 0.45 * gain + noise,
                "rewards/correctness_check/mean": 0.4 + 0.42 * gain + noise,
                "rewards/lenient_correctness_check/mean": 0.5 + 0.35 * gain + noise,
                "rewards/format_check/mean": min(1.0, 0.66 + 0.34 * gain + noise / 3),
                "rewards/tag_check/mean": min(0.5, 0.4 + 0.1 * gain + noise / 5),
                "rewards/step_check/mean": 0.5 + 0.2 * gain + noise,
                "rewards/solution_number_check/mean": min(1.0, 0.7 + 0.3 * gain + noise / 3),
                "strict": 0.35 + 0.45 * gain + noise,
                "lenient": 0.45 + 0.36 * gain + noise,
                "live_share": 0.9 - 0.4 * gain + noise,
                "mean_tokens": 31 - 7 * gain + 10 * noise,
                "truncated_share": max(0.0, 0.05 * (1 - gain) + noise / 10),
                "drift_mean": 3e-6 + abs(draw.gauss(0, 4e-7)),
                "drift_max": 2e-5 + abs(draw.gauss(0, 4e-6)),
                "dropped_share": 0.0,
            }
        )
        for group in range(PROMPTS):
            live = draw.random() < 0.9 - 0.4 * gain
            for index in range(GROUP):
                reward = float(draw.random() < 0.5) if live else 1.0
                rollouts.append(
                    {
                        "step": step,
                        "question_id": f"symbolic-train-{group}",
                        "sample_index": index,
                        "prompt": "p",
                        "completion": "c",
                        "num_tokens": draw.randint(15, 40),
                        "finish_reason": "stop",
                        "status": "ok",
                        "strict": reward == 1.0,
                        "lenient": reward == 1.0,
                        "reward": reward,
                        "advantage": 0.0,
                        "policy_version": step - 1,
                    }
                )
    return metrics, rollouts


def _finished(ctx: StageContext, node: str, result: Any, **fields: Any) -> Artifact:
    """What a real stage wrote, as an artifact."""
    return artifact(
        ctx.out_dir, node, {}, summary=result.summary, markdown=result.markdown, **fields
    )


def _presampled(
    root: Path, nodes: dict[str, Artifact], draw: random.Random, train: Rows
) -> dict[str, Artifact]:
    """What sampling before training and scoring left."""
    sampled = completions(draw, train, 8, 0.75, 0.6)
    presample = artifact(
        root / "presample",
        "presample",
        {"completions": sampled},
        sampled_tokens=sum(row["num_tokens"] for row in sampled),
        device_seconds=20.0,
        duration_seconds=24.0,
        config=SETTINGS,
    )
    (root / "score").mkdir()
    ctx = context(root / "score", {"completions": presample, "questions": nodes["decontaminate"]})
    scored = score.run(ctx, prompt=PROMPT, rewards=RewardsConfig())
    return {"presample": presample, "score": _finished(ctx, "score", scored)}


def _logged(root: Path, nodes: dict[str, Artifact], rows: Rows) -> dict[str, Artifact]:
    """What reading the rollouts of an earlier run left."""
    earlier = artifact(root / "earlier", "grpo", {"rollouts": rows})
    (root / "rollouts").mkdir()
    inputs = {"questions": nodes["decontaminate"], "rollouts": earlier}
    ctx = context(root / "rollouts", inputs)
    found = rollouts_stage.run(ctx, prompt=PROMPT, rollouts=RolloutsConfig(path=earlier.ref))
    return {"rollouts": _finished(ctx, "rollouts", found)}


def make_run(
    root: Path,
    *,
    warmstart: bool = True,
    benchmark: bool = True,
    size: int = 60,
    rl: float = 1.25,
    samples: int = 0,
    control: bool = False,
    logged: bool = False,
) -> dict[str, Artifact]:
    """A run's artifacts by node name; `rl` is the skill after RL (0.75 before), `samples` are drawn
    of each test question, `control` adds the variant of a format reward, `logged` selects from the
    rollouts of an earlier run in place of presamples."""
    draw = random.Random(5)
    train = questions(draw, "train", "symbolic", size)
    test = questions(draw, "test", "symbolic", size)
    held = questions(draw, "test", "symbolic-heldout", size // 2)
    everything = {
        "summary": {"prefilled": ""},
        "config": SETTINGS,
        "duration_seconds": 2.4,
    }
    nodes: dict[str, Artifact] = {
        "model": artifact(root / "model", "model", {}, config=SETTINGS),
        "questions": artifact(
            root / "questions", "questions", {"questions": train + test + held}, **everything
        ),
    }
    nodes["decontaminate"] = artifact(
        root / "decontaminate",
        "decontaminate",
        {"questions": train + test + held, "contaminated": [contaminated(test[0])]},
        **everything,
    )
    if benchmark:
        rows = [
            {
                "prompt_format": name,
                "thinking": "no switch",
                "decoding": "greedy",
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "num_questions": 120,
                "strict": strict,
                "strict_low": strict - 0.08,
                "strict_high": strict + 0.08,
                "lenient": 0.4,
                "lenient_low": 0.32,
                "lenient_high": 0.49,
                "parse_failure_rate": 0.04,
                "truncated_share": 0.01,
                "mean_tokens": 30.0,
                "answers_elsewhere": '{"boxed": 0.25}',
            }
            for name, strict in [("tags_short", 0.31), ("hash_short", 0.22), ("boxed_short", 0.2)]
        ]
        nodes["benchmark"] = artifact(
            root / "benchmark",
            "benchmark",
            {"benchmark": rows},
            summary={
                "words": ["tags_short: the format costs 9 points; answers stood in \\boxed{}."]
            },
        )

    if not logged:
        nodes |= _presampled(root, nodes, draw, train)
    metrics, rollouts = training(draw)
    if logged:
        nodes |= _logged(root, nodes, rollouts)
    (root / "filter").mkdir()
    scores = nodes["rollouts" if logged else "score"]
    ctx = context(root / "filter", {"scores": scores, "questions": nodes["decontaminate"]})
    chosen = filter.run(ctx, filter=FilterConfig(), grpo=GrpoConfig(group_size=GROUP))
    nodes["filter"] = _finished(ctx, "filter", chosen)
    if warmstart:
        dev = {10: 0.7, 20: 0.81, 30: 0.78}
        loss = [
            {"step": step, "loss": 0.4 + 1.1 * 0.85**step, "dev_strict": dev.get(step)}
            for step in range(1, 31)
        ]
        nodes["warmstart"] = artifact(
            root / "warmstart",
            "warmstart_sft",
            {"metrics": loss},
            summary={"best_step": 20, "dev_strict_best": 0.81},
            device_seconds=9.0,
            duration_seconds=12.0,
        )
    nodes["grpo"] = artifact(
        root / "grpo",
        "grpo",
        {"metrics": metrics, "rollouts": rollouts},
        sampled_tokens=sum(row["num_tokens"] for row in rollouts),
        device_seconds=70.0,
        duration_seconds=81.0,
        config=SETTINGS
        | {"grpo": {"steps": STEPS, "lora": {"r": 16}}, "guard": {}, "rewards": {"weights": {}}},
    )
    levels = {"baseline": (0.75, 0.65)} | ({"warmstart": (0.9, 0.8)} if warmstart else {})
    levels |= {"rl": (rl, 0.97)} | ({"format-reward": (0.8, 0.97)} if control else {})
    dice = random.Random(6)
    for variant, (level, tidy) in levels.items():
        rows = evaluated(draw, test + held, variant, level, tidy)
        for index in range(samples):
            rows += evaluated(dice, test + held, variant, level, tidy, index)
        nodes[f"evaluate.{variant}"] = artifact(
            root / f"evaluate-{variant}",
            "evaluate",
            {"eval": rows},
            config=SETTINGS,
            summary={"verifier": "2-aa"},
            sampled_tokens=sum(row["num_tokens"] for row in rows),
            device_seconds=6.0,
            duration_seconds=8.0,
        )
    (root / "compare").mkdir()
    variants = {
        name.removeprefix("evaluate."): nodes[name] for name in nodes if "evaluate." in name
    }
    ctx = context(root / "compare", {"questions": nodes["questions"]} | variants)
    done = compare.run(ctx, evaluate=EvaluateConfig(samples=samples))
    nodes["compare"] = _finished(ctx, "compare", done)
    return nodes
