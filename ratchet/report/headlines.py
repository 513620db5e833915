"""The figures of a stage that a person wants to see first.

`headline` is a line, `label` a few words for a node of a picture. Artifacts of older code may lack
a figure; they get none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Summary = dict[str, Any]

MANY_FORMATS = 4
"""Of more, a benchmark's headline names the best only."""


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _benchmark(summary: Summary) -> str:
    strict = {name: figures["strict"] for name, figures in summary["formats"].items()}
    if len(strict) > MANY_FORMATS:
        return f"strict {_best_format(summary)}, the best of {len(strict)}"
    return "strict " + ", ".join(f"{name} {_share(value)}" for name, value in strict.items())


def _best_format(summary: Summary) -> str:
    strict = {name: figures["strict"] for name, figures in summary["formats"].items()}
    best = max(strict, key=lambda name: strict[name])
    return f"{best} {_share(strict[best])}"


def _evaluate(summary: Summary) -> str:
    parts = [
        f"{name} {_share(decodings['greedy']['strict'])}"
        for name, decodings in summary["benchmarks"].items()
    ]
    return "strict " + ", ".join(parts)


def _evaluate_label(summary: Summary) -> str:
    shares = (decodings["greedy"]["strict"] for decodings in summary["benchmarks"].values())
    return "strict " + ", ".join(map(_share, shares))


def _grpo(summary: Summary) -> str:
    return (
        f"reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f}, strict "
        f"{_share(summary['strict_first'])} → {_share(summary['strict_last'])}"
    )


def _audit(summary: Summary) -> str:
    if not summary["passed"]:
        return f"failed, {summary['probe']}: {summary['cause']}"
    return f"passed, drift {summary['drift_last']:.1e} after {summary['num_syncs']} syncs"


def _presample(summary: Summary) -> str:
    rate = summary["tokens_per_second"]  # None where all was sampled before
    speed = f", {rate:,.0f} tokens/s" if rate else ""
    return f"{summary['num_completions']:,} completions{speed}"


def _loss(summary: Summary) -> str:
    dev = f", dev {_share(summary['dev_strict_best'])}" if "dev_strict_best" in summary else ""
    return f"loss {summary['first_loss']:.3f} → {summary['final_loss']:.3f}{dev}"


HEADLINES: dict[str, Callable[[Summary], str]] = {
    "model": lambda s: f"{s['num_parameters']:,} parameters",
    "questions": lambda s: (
        f"{s['questions']['train']:,} to train, {s['questions']['test']:,} to test"
    ),
    "decontaminate": lambda s: (
        f"{s['questions']['train']:,} to train, {s['num_dropped']:,} dropped"
    ),
    "benchmark": _benchmark,
    "presample": _presample,
    "score": lambda s: f"strict {_share(s['strict'])}, lenient {_share(s['lenient'])}",
    "rollouts": lambda s: (
        f"{s['num_samples']:,} completions of {s['num_questions']:,} questions, lenient "
        f"{_share(s['lenient'])}"
    ),
    "filter": lambda s: (
        f"{s['roles']['rl']:,} for RL, {s['roles']['warmup']:,} to warm up; recommendation: "
        f"{s['recommendation']['action']}"
    ),
    "headroom": lambda s: f"{_share(s['rl_live_share'])} of the RL groups expected live",
    "warmstart_sft": _loss,
    "warmstart_opd": _loss,
    "audit": _audit,
    "grpo": _grpo,
    "evaluate": _evaluate,
    "compare": lambda s: s["outcome"],
    "report": lambda s: s["report"],
}
LABELS: dict[str, Callable[[Summary], str]] = {
    "model": lambda s: s["source"].rstrip("/").rpartition("/")[2],
    "questions": lambda s: f"{s['questions']['train']:,} to train",
    "benchmark": _best_format,
    "decontaminate": lambda s: f"{s['num_dropped']:,} dropped",
    "presample": lambda s: f"{s['num_completions']:,} completions",
    "rollouts": lambda s: f"{s['num_samples']:,} completions",
    "headroom": lambda s: f"{_share(s['rl_live_share'])} live",
    "score": lambda s: f"lenient {_share(s['lenient'])}",
    "filter": lambda s: f"{s['roles']['rl']:,} for RL",
    "audit": lambda s: "passed" if s["passed"] else f"failed: {s['cause']}",
    "grpo": lambda s: f"strict {_share(s['strict_first'])} → {_share(s['strict_last'])}",
    "evaluate": _evaluate_label,
    "report": lambda s: "",
}


def headline(stage: str, summary: Summary) -> str:
    """The stage's headline."""
    try:
        return HEADLINES[stage](summary)
    except (KeyError, TypeError):  # a figure that isn't there, or None for one that can't be had
        return ""


def label(stage: str, summary: Summary) -> str:
    """The stage's figure in a few words."""
    try:
        return LABELS.get(stage, HEADLINES[stage])(summary)
    except (KeyError, TypeError):
        return ""
