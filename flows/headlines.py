"""The one figure of a stage that a person wants to see first.

Artifacts of older code may lack a figure; they get no headline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Summary = dict[str, Any]


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _benchmark(summary: Summary) -> str:
    strict = {name: figures["strict"] for name, figures in summary["formats"].items()}
    return "strict " + ", ".join(f"{name} {_share(value)}" for name, value in strict.items())


def _evaluate(summary: Summary) -> str:
    parts = [
        f"{name} {_share(decodings['greedy']['strict'])}"
        for name, decodings in summary["benchmarks"].items()
    ]
    return "strict " + ", ".join(parts)


def _grpo(summary: Summary) -> str:
    return (
        f"reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f}, strict "
        f"{_share(summary['strict_first'])} → {_share(summary['strict_last'])}"
    )


HEADLINES: dict[str, Callable[[Summary], str]] = {
    "model": lambda s: f"{s['num_parameters']:,} parameters",
    "questions": lambda s: (
        f"{s['questions']['train']:,} to train, {s['questions']['test']:,} to test"
    ),
    "benchmark": _benchmark,
    "presample": lambda s: (
        f"{s['num_completions']:,} completions, {s['tokens_per_second']:,.0f} tokens/s"
    ),
    "score": lambda s: f"strict {_share(s['strict'])}, lenient {_share(s['lenient'])}",
    "filter": lambda s: f"{s['roles']['rl']:,} for RL, {s['roles']['warmup']:,} to warm up",
    "warmstart_sft": lambda s: f"loss {s['first_loss']:.3f} → {s['final_loss']:.3f}",
    "warmstart_opd": lambda s: f"loss {s['first_loss']:.3f} → {s['final_loss']:.3f}",
    "grpo": _grpo,
    "evaluate": _evaluate,
    "compare": lambda s: s["outcome"],
    "report": lambda s: s["report"],
}


def headline(stage: str, summary: Summary) -> str:
    """The stage's headline."""
    try:
        return HEADLINES[stage](summary)
    except KeyError:
        return ""
