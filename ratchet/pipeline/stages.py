"""The stages of the pipeline, each told in one place. CONTRIBUTING.md says how one is added.

`STAGES` stands in the order of a run; `ratchet.pipeline.dag` moves what has to wait for its inputs.
Code is named by strings, so that planning loads none of it; tests resolve each.
"""

from __future__ import annotations

from functools import partial

from ratchet import prompts
from ratchet.config.base import Section
from ratchet.config.run import GrpoConfig, RolloutsConfig, RunConfig
from ratchet.models import check
from ratchet.pipeline.controls import control_rewards
from ratchet.pipeline.stage import Node, Row, Stage, Summary
from ratchet.questions import load
from ratchet.report import templates
from ratchet.rollouts import files
from ratchet.store.keys import KEY_LENGTH

CLEAN = "decontaminate"
"""The node whose questions training reads. What only measures reads `questions`, which has the
same held-out ones, so that another decontamination measures nothing anew."""
MANY_FORMATS = 4
"""Of more, a benchmark's headline names the best only."""


def _question_prints(config: RunConfig, node: Node) -> dict[str, str]:
    return {
        f"{role}.{index}": load.fingerprint(source)
        for role in ("train", "warmup", "dev", "test")
        for index, source in enumerate(getattr(config.questions, role))
    }


def _samples(config: RunConfig) -> bool:
    """Whether a model is sampled to select RL's questions, not an earlier run's log read."""
    return config.rollouts.path is None


def logged_by(rollouts: RolloutsConfig) -> dict[str, tuple[str, str]]:
    """The GRPO artifact of this store that `rollouts.path` names, as a node is given it; nothing
    for a file or folder."""
    stage, _, key = (rollouts.path or "").partition("/")
    is_ref = stage == "grpo" and len(key) == KEY_LENGTH
    return {"rollouts": (stage, key)} if is_ref else {}


def _rollouts(config: RunConfig) -> list[Node]:
    if _samples(config):
        return []
    return [Node("rollouts", "rollouts", {"questions": CLEAN}, given=logged_by(config.rollouts))]


def _filter(config: RunConfig) -> list[Node]:
    """The filter counts live groups of the size that RL will have. Nothing else of RL's settings
    reaches it, so that changing them selects nothing anew."""
    inputs = {"scores": "score" if _samples(config) else "rollouts", "questions": CLEAN}
    sizes = GrpoConfig(group_size=config.grpo.group_size)
    return [Node("filter", "filter", inputs, {"grpo": sizes})]


def _gate(config: RunConfig) -> tuple[str, ...]:
    """The node that lets what uses the selection pass, where there is one."""
    return ("headroom",) if config.headroom.min_live_share > 0 else ()


def _policy(config: RunConfig) -> str:
    """The node whose model RL starts from."""
    return "model" if config.warmstart.method == "none" else "warmstart"


def _warm_up(method: str, config: RunConfig) -> list[Node]:
    if config.warmstart.method != method:
        return []
    inputs = {"model": "model", "questions": CLEAN}
    if config.warmstart.data == "dropped":
        inputs["selection"] = "filter"
    if method == "sft" and config.sft.samples != "none":
        inputs |= {"completions": "presample", "scores": "score"}
    after = _gate(config) if "selection" in inputs else ()
    return [Node("warmstart", f"warmstart_{method}", inputs, after=after)]


def _preflight(config: RunConfig) -> list[Node]:
    """The weight sync is audited before RL: there is none without vLLM."""
    if not config.audit.preflight or config.sampler.engine != "vllm":
        return []
    asked = {"sync": config.audit.sync, "vllm_mode": config.audit.vllm_mode}
    changed = {name: value for name, value in asked.items() if value != "run"}
    grpo = config.grpo.model_copy(update=changed)
    return [Node("audit", "audit", {"model": _policy(config)}, {"grpo": grpo})]


def _grpo(config: RunConfig) -> list[Node]:
    """RL, and a control for each reward that knows nothing of the right answer."""
    inputs = {"model": _policy(config), "questions": CLEAN, "selection": "filter"}
    after = _gate(config) + tuple(node.name for node in _preflight(config))
    rewards = {
        control: control_rewards(control, config.rewards, config.prompt.format)
        for control in config.evaluate.controls
    }
    return [Node("grpo", "grpo", inputs, after=after)] + [
        Node(f"grpo.{control}", "grpo", inputs, {"rewards": changed}, after)
        for control, changed in rewards.items()
    ]


def _variants(config: RunConfig) -> dict[str, str]:
    """Node that makes or finds its model, by variant."""
    warm = {} if config.warmstart.method == "none" else {"warmstart": "warmstart"}
    controls = {control.value: f"grpo.{control}" for control in config.evaluate.controls}
    others = {variant.name: f"model.{variant.name}" for variant in config.evaluate.variants}
    return {"baseline": "model"} | warm | {"rl": "grpo"} | controls | others


def _evaluate(config: RunConfig) -> list[Node]:
    """An evaluation per variant, and the models that only `evaluate.variants` names."""
    models: dict[str, Node] = {}
    for other in config.evaluate.variants:
        its = config.model.model_copy(update={"path": other.path, "revision": other.revision})
        models[other.name] = Node(f"model.{other.name}", "model", {}, {"model": its})
    found = list(models.values())
    for variant, model in _variants(config).items():
        evaluate = config.evaluate.alone
        if variant != "baseline":
            evaluate = evaluate.model_copy(update={"band_samples": 0})
        settings: dict[str, Section] = {"evaluate": evaluate}
        if variant in models:
            settings |= models[variant].settings
        inputs = {"model": model, "questions": "questions"}
        found.append(Node(f"evaluate.{variant}", "evaluate", inputs, settings))
    return found


def _strict(summary: Summary) -> dict[str, float]:
    """Strict accuracy by prompt format."""
    return {name: figures["strict"] for name, figures in summary["formats"].items()}


def _best_format(summary: Summary) -> str:
    strict = _strict(summary)
    best = max(strict, key=lambda name: strict[name])
    return f"{best} {strict[best]:.1%}"


def _formats(summary: Summary) -> list[str]:
    strict = _strict(summary)
    if len(strict) > MANY_FORMATS:
        return [f"strict {_best_format(summary)}", f"the best of {len(strict)}"]
    return ["strict " + ", ".join(f"{name} {value:.1%}" for name, value in strict.items())]


def _presampled(summary: Summary) -> list[str]:
    rate = summary["tokens_per_second"]  # None where all was sampled before
    completions = f"{summary['num_completions']:,} completions"
    return [completions, f"{rate:,.0f} tokens/s"] if rate else [completions]


def _loss(summary: Summary) -> list[str]:
    loss = f"loss {summary['first_loss']:.3f} → {summary['final_loss']:.3f}"
    best = summary.get("dev_strict_best")
    return [loss] if best is None else [loss, f"dev {best:.1%}"]


def _audit(summary: Summary) -> list[str]:
    if not summary["passed"]:
        return [f"failed: {summary['cause']}", f"seen by {summary['probe']}"]
    return ["passed", f"drift {summary['drift_last']:.1e} after {summary['num_syncs']} syncs"]


def _greedy(summary: Summary) -> dict[str, str]:
    """Strict accuracy of greedy answers, by benchmark."""
    return {
        name: f"{decodings['greedy']['strict']:.1%}"
        for name, decodings in summary["benchmarks"].items()
    }


def _evaluation(summary: Summary) -> list[Row]:
    """A row per benchmark and decoding, shares of each verdict included."""
    return [
        {"benchmark": benchmark, "decoding": decoding}
        | {name: value for name, value in figures.items() if name != "status_rates"}
        | {f"verdict {name}": value for name, value in figures["status_rates"].items()}
        for benchmark, decodings in summary["benchmarks"].items()
        for decoding, figures in decodings.items()
    ]


_EVERY: tuple[Stage, ...] = (
    Stage(
        "model",
        "tasks.stages.model:run",
        "find the model, check that it can be used",
        sections=("model",),
        outside=lambda config, node: {"model": check.fingerprint(config.model)},
        figures=lambda s: [f"{s['num_parameters']:,} parameters"],
        short=lambda s: s["source"].rstrip("/").rpartition("/")[2],
    ),
    Stage(
        "questions",
        "tasks.stages.questions:run",
        "load and check the questions",
        sections=("questions", "prompt", "model", "sampler"),
        inputs={"model": "model"},
        outside=_question_prints,
        figures=lambda s: [
            f"{s['questions']['train']:,} to train",
            f"{s['questions']['test']:,} to test",
        ],
    ),
    Stage(
        "decontaminate",
        "tasks.stages.decontaminate:run",
        "drop training questions that give a held-out one away",
        sections=("questions", "decontaminate"),
        inputs={"questions": "questions"},
        figures=lambda s: [
            f"{s['num_dropped']:,} dropped",
            f"{s['questions']['train']:,} to train",
        ],
    ),
    Stage(
        "benchmark",
        "tasks.stages.benchmark:run",
        "measure prompt formats, thinking and decoding",
        sections=("model", "prompt", "sampler", "workers", "benchmark"),
        unkeyed=("workers",),
        needs_device=True,
        inputs={"model": "model", "questions": "questions"},
        when=lambda config: bool(getattr(config.questions, config.benchmark.role)),
        outside=lambda config, node: {
            f"prompt.{name}": prompts.fingerprint(name) for name in config.benchmark.formats
        },
        figures=_formats,
        short=_best_format,
        shares=_strict,
        table="benchmark",
    ),
    Stage(
        "presample",
        "tasks.stages.presample:run",
        "sample every training question",
        sections=("model", "prompt", "sampler", "workers", "presample"),
        unkeyed=("workers",),
        needs_device=True,
        inputs=lambda config: {
            "model": "warmstart" if config.presample.after_warmstart else "model",
            "questions": CLEAN,
        },
        when=_samples,
        figures=_presampled,
    ),
    Stage(
        "score",
        "tasks.stages.score:run",
        "verify and reward every sampled completion",
        sections=("prompt", "rewards"),
        inputs={"completions": "presample", "questions": CLEAN},
        when=_samples,
        form="rewards",
        figures=lambda s: [f"lenient {s['lenient']:.1%}", f"strict {s['strict']:.1%}"],
    ),
    Stage(
        "rollouts",
        "tasks.stages.rollouts:run",
        "read what an earlier RL run logged",
        sections=("prompt", "rollouts"),
        nodes=_rollouts,
        outside=lambda config, node: (
            {} if node.given else {"rollouts": files.fingerprint(config.rollouts)}
        ),
        figures=lambda s: [
            f"{s['num_samples']:,} completions of {s['num_questions']:,} questions",
            f"lenient {s['lenient']:.1%}",
        ],
    ),
    Stage(
        "filter",
        "tasks.stages.filter:run",
        "keep the questions that can teach something",
        sections=("filter", "grpo"),
        nodes=_filter,
        figures=lambda s: [
            f"{s['roles']['rl']:,} for RL",
            f"{s['roles']['warmup']:,} to warm up; recommendation: {s['recommendation']['action']}",
        ],
        charts=("ratchet.report.plots:pass_rates",),
    ),
    Stage(
        "headroom",
        "tasks.stages.headroom:run",
        "stop where there is too little to gain",
        sections=("headroom",),
        inputs={"selection": "filter"},
        when=lambda config: bool(_gate(config)),
        figures=lambda s: [f"{s['rl_live_share']:.1%} of the RL groups expected live"],
    ),
    *(
        Stage(
            f"warmstart_{method}",
            f"tasks.stages.warmstart_{method}:run",
            gist,
            sections=("model", "prompt", "sampler", "warmstart", method, "wandb"),
            needs_device=True,
            nodes=partial(_warm_up, method),
            form=method,
            implied=(f'warmstart.method="{method}"',),
            figures=_loss,
            table="metrics",
            charts=("ratchet.report.curves:warmstart_loss",),
        )
        for method, gist in (
            ("sft", "supervised fine-tuning on reference solutions"),
            ("opd", "on-policy distillation from a teacher"),
        )
    ),
    Stage(
        "audit",
        "tasks.stages.audit:run",
        "prove that sampler and trainer are one policy",
        sections=("model", "prompt", "sampler", "grpo", "audit"),
        needs_device=True,
        nodes=_preflight,
        figures=_audit,
        table="audit",
    ),
    Stage(
        "grpo",
        "tasks.stages.grpo:run",
        "reinforcement learning on verifiable rewards",
        sections=("model", "prompt", "sampler", "rewards", "grpo", "guard", "wandb"),
        unkeyed=("guard",),
        needs_device=True,
        nodes=_grpo,
        figures=lambda s: [
            f"strict {s['strict_first']:.1%} → {s['strict_last']:.1%}",
            f"reward {s['reward_first']:.2f} → {s['reward_last']:.2f}",
        ],
        table="metrics",
        charts=(
            "ratchet.report.curves:total_reward",
            "ratchet.report.curves:accuracy",
            "ratchet.report.curves:live_groups",
            "ratchet.report.curves:drift",
        ),
    ),
    Stage(
        "evaluate",
        "tasks.stages.evaluate:run",
        "answer and verify the held-out questions",
        sections=("model", "prompt", "sampler", "workers", "evaluate"),
        unkeyed=("workers",),
        needs_device=True,
        nodes=_evaluate,
        figures=lambda s: [
            "strict " + ", ".join(f"{name} {share}" for name, share in _greedy(s).items())
        ],
        short=lambda s: "strict " + ", ".join(_greedy(s).values()),
        shares=lambda s: {
            f"{name}, {decoding}": figures["strict"]
            for name, decodings in s["benchmarks"].items()
            for decoding, figures in decodings.items()
        },
        table=_evaluation,
    ),
    Stage(
        "compare",
        "tasks.stages.compare:run",
        "compare the variants question by question",
        sections=("evaluate",),
        inputs=lambda config: {
            "questions": "questions",
            **{variant: f"evaluate.{variant}" for variant in _variants(config)},
        },
        figures=lambda s: [s["outcome"]],
        table="comparison",
        charts=("ratchet.report.plots:forest", "ratchet.report.plots:by_band"),
    ),
    Stage(
        "report",
        "tasks.stages.report:run",
        "write the report",
        sections=("evaluate", "wandb"),
        reads_all=True,
        outside=lambda config, node: {"page": templates.fingerprint()},
        figures=lambda s: [s["report"]],
        short=lambda s: "",
    ),
)

STAGES: dict[str, Stage] = {stage.name: stage for stage in _EVERY}
"""The stages by name."""
