"""The pipeline as data: which stages exist, what each may see, and how they depend on each other.

A *stage* is a kind of work (`sample`, `filter`, …) with a module in `tasks/` whose `run` takes the
configuration sections named here and nothing else. A *node* is one use of a stage in a run: the
evaluation of three arms is three nodes of one stage. `nodes(config)` lists a run's nodes in an
order in which each comes after its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ratchet.config.base import Section
from ratchet.config.run import GrpoConfig, RolloutsConfig, RunConfig
from ratchet.errors import UserError
from ratchet.pipeline.controls import control_rewards
from ratchet.store.keys import KEY_LENGTH

CLEAN = "decontaminate"
"""The node whose questions training reads. What only measures reads `questions`, which has the
same held-out ones, so that another decontamination measures nothing anew."""


@dataclass(frozen=True)
class Stage:
    """One kind of work."""

    module: str
    """Module whose `run(ctx, **sections)` does it."""
    sections: tuple[str, ...]
    """Configuration sections it is given; they enter its key, but for `unkeyed`."""
    needs_device: bool
    """Whether it takes the device slot (it loads a model)."""
    gist: str
    """One line for people."""
    unkeyed: tuple[str, ...] = ()
    """Sections that can stop it or speed it up but not change what it makes."""


STAGES: dict[str, Stage] = {
    "model": Stage(
        "tasks.stages.model", ("model",), False, "find the model, check that it can be used"
    ),
    "questions": Stage(
        "tasks.stages.questions",
        ("questions", "prompt", "model", "sampler"),
        False,
        "load and check the questions",
    ),
    "decontaminate": Stage(
        "tasks.stages.decontaminate",
        ("questions", "decontaminate"),
        False,
        "drop training questions that give a held-out one away",
    ),
    "benchmark": Stage(
        "tasks.stages.benchmark",
        ("model", "prompt", "sampler", "workers", "benchmark"),
        True,
        "measure prompt formats, thinking and decoding",
        unkeyed=("workers",),
    ),
    "presample": Stage(
        "tasks.stages.presample",
        ("model", "prompt", "sampler", "workers", "presample"),
        True,
        "sample every training question",
        unkeyed=("workers",),
    ),
    "score": Stage(
        "tasks.stages.score",
        ("prompt", "rewards"),
        False,
        "verify and reward every sampled completion",
    ),
    "rollouts": Stage(
        "tasks.stages.rollouts", ("prompt", "rollouts"), False, "read what an earlier RL run logged"
    ),
    "filter": Stage(
        "tasks.stages.filter",
        ("filter", "grpo"),
        False,
        "keep the questions that can teach something",
    ),
    "headroom": Stage(
        "tasks.stages.headroom", ("headroom",), False, "stop where there is too little to gain"
    ),
    "warmstart_sft": Stage(
        "tasks.stages.warmstart_sft",
        ("model", "prompt", "sampler", "warmstart", "sft", "wandb"),
        True,
        "supervised fine-tuning on reference solutions",
    ),
    "warmstart_opd": Stage(
        "tasks.stages.warmstart_opd",
        ("model", "prompt", "sampler", "warmstart", "opd", "wandb"),
        True,
        "on-policy distillation from a teacher",
    ),
    "audit": Stage(
        "tasks.stages.audit",
        ("model", "prompt", "sampler", "grpo", "audit"),
        True,
        "prove that sampler and trainer are one policy",
    ),
    "grpo": Stage(
        "tasks.stages.grpo",
        ("model", "prompt", "sampler", "rewards", "grpo", "guard", "wandb"),
        True,
        "reinforcement learning on verifiable rewards",
        unkeyed=("guard",),
    ),
    "evaluate": Stage(
        "tasks.stages.evaluate",
        ("model", "prompt", "sampler", "workers", "evaluate"),
        True,
        "answer and verify the held-out questions",
        unkeyed=("workers",),
    ),
    "compare": Stage(
        "tasks.stages.compare", ("evaluate",), False, "compare the arms question by question"
    ),
    "report": Stage("tasks.stages.report", ("evaluate", "wandb"), False, "write the report"),
}


@dataclass(frozen=True)
class Node:
    """One use of a stage in a run."""

    name: str
    """Unique in the run; the stage's name, or `stage.arm`."""
    stage: str
    """Key into `STAGES`."""
    inputs: dict[str, str]
    """Role that the stage's code knows an input by → name of the node that makes it."""
    settings: Mapping[str, Section] = field(default_factory=dict)
    """Sections in which this node differs from the run."""
    after: tuple[str, ...] = ()
    """Nodes that must be there first, though it reads nothing of them: they don't enter its key."""
    given: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Role → (stage, key) of inputs that an earlier run made."""

    def config(self, config: RunConfig) -> RunConfig:
        """The run's configuration as this node sees it."""
        return config.model_copy(update=dict(self.settings))


def nodes(config: RunConfig) -> list[Node]:
    """The nodes of a run in topological order."""
    found = [
        Node("model", "model", {}),
        Node("questions", "questions", {"model": "model"}),
        Node("decontaminate", "decontaminate", {"questions": "questions"}),
    ]
    if getattr(config.questions, config.benchmark.role):
        found.append(Node("benchmark", "benchmark", {"model": "model", "questions": "questions"}))
    selection = _selection(config)
    gate = tuple(node.name for node in selection if node.stage == "headroom")
    warm = _warm_up(config, gate)
    found += warm + selection if selects_after_warm_up(config) else selection + warm

    policy = "warmstart" if warm else "model"
    preflight = []
    if has_preflight(config):
        preflight = [Node("audit", "audit", {"model": policy}, {"grpo": audited(config)})]
    found += preflight
    rl = Node(
        "grpo",
        "grpo",
        {"model": policy, "questions": CLEAN, "selection": "filter"},
        after=gate + tuple(node.name for node in preflight),
    )
    found.append(rl)
    arms = {"baseline": "model"} | ({"warmstart": "warmstart"} if warm else {}) | {"rl": "grpo"}
    others = further_arms(config, rl)
    found += others.values()
    arms |= {arm: node.name for arm, node in others.items()}
    for arm, model in arms.items():
        inputs = {"model": model, "questions": "questions"}
        evaluate = config.evaluate.alone
        if arm != "baseline":
            evaluate = evaluate.model_copy(update={"band_samples": 0})
        settings: dict[str, Section] = {"evaluate": evaluate}
        if arm in others and "model" in others[arm].settings:
            settings["model"] = others[arm].settings["model"]
        found.append(Node(f"evaluate.{arm}", "evaluate", inputs, settings))
    evaluated = {arm: f"evaluate.{arm}" for arm in arms}
    found.append(Node("compare", "compare", {"questions": "questions"} | evaluated))
    found.append(Node("report", "report", {node.name: node.name for node in found}))
    return found


def selects_after_warm_up(config: RunConfig) -> bool:
    """Whether the warmed-up model is sampled to select RL's questions. What an earlier run logged
    needs no sampling."""
    return config.presample.after_warmstart and config.rollouts.path is None


def _selection(config: RunConfig) -> list[Node]:
    """The nodes that find RL's questions."""
    if config.rollouts.path is None:
        model = "warmstart" if selects_after_warm_up(config) else "model"
        found = [
            Node("presample", "presample", {"model": model, "questions": CLEAN}),
            Node("score", "score", {"completions": "presample", "questions": CLEAN}),
        ]
    else:
        found = [
            Node("rollouts", "rollouts", {"questions": CLEAN}, given=logged_by(config.rollouts))
        ]
    found.append(Node("filter", "filter", {"scores": found[-1].name, "questions": CLEAN}))
    if config.headroom.min_live_share > 0:
        found.append(Node("headroom", "headroom", {"selection": "filter"}))
    return found


def logged_by(rollouts: RolloutsConfig) -> dict[str, tuple[str, str]]:
    """The GRPO artifact of this store that `rollouts.path` names, as a node is given it; nothing
    for a file or folder."""
    stage, _, key = (rollouts.path or "").partition("/")
    is_ref = stage == "grpo" and len(key) == KEY_LENGTH
    return {"rollouts": (stage, key)} if is_ref else {}


def _warm_up(config: RunConfig, gate: tuple[str, ...]) -> list[Node]:
    """The warm-start's node, if there is one; `gate` lets it pass where it uses the selection."""
    if config.warmstart.method == "none":
        return []
    inputs = {"model": "model", "questions": CLEAN}
    if config.warmstart.data == "dropped":
        inputs["selection"] = "filter"
    if config.warmstart.method == "sft" and config.sft.samples != "none":
        inputs |= {"completions": "presample", "scores": "score"}
    stage = f"warmstart_{config.warmstart.method}"
    return [Node("warmstart", stage, inputs, after=gate if "selection" in inputs else ())]


def has_preflight(config: RunConfig) -> bool:
    """Whether the weight sync is audited before RL: there is none without vLLM."""
    return config.audit.preflight and config.sampler.engine == "vllm"


def audited(config: RunConfig) -> GrpoConfig:
    """The settings of GRPO as the audit is to see them."""
    asked = {"sync": config.audit.sync, "vllm_mode": config.audit.vllm_mode}
    return config.grpo.model_copy(
        update={name: value for name, value in asked.items() if value != "run"}
    )


def further_arms(config: RunConfig, rl: Node) -> dict[str, Node]:
    """By arm, the nodes that make the models of controls and find those of `evaluate.arms`."""
    found = {}
    for control in config.evaluate.controls:
        rewards = control_rewards(control, config.rewards, config.prompt.format)
        name = f"{rl.name}.{control}"
        found[control.value] = Node(name, "grpo", rl.inputs, {"rewards": rewards}, rl.after)
    for arm in config.evaluate.arms:
        model = config.model.model_copy(update={"path": arm.path, "revision": arm.revision})
        found[arm.name] = Node(f"model.{arm.name}", "model", {}, {"model": model})
    return found


def nodes_named(config: RunConfig, name: str) -> list[Node]:
    """The node called `name`, or all nodes of the stage called so: 'evaluate' is every arm.

    UserError when there is none.
    """
    every = nodes(config)
    found = [node for node in every if node.name == name] or [
        node for node in every if node.stage == name
    ]
    if not found:
        names = ", ".join(node.name for node in every)
        raise UserError(f"this run has no stage '{name}': it has {names}")
    return found


def ancestors(config: RunConfig, name: str, *, read: bool = False) -> set[str]:
    """Names of the nodes that must be there before `name`; with `read` only those whose artifacts
    it depends on."""
    by_name = {node.name: node for node in nodes(config)}

    def above(node: Node) -> list[str]:
        return [*node.inputs.values(), *(() if read else node.after)]

    found: set[str] = set()
    todo = above(by_name[name])
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo.extend(above(by_name[current]))
    return found


def descendants(config: RunConfig, name: str) -> set[str]:
    """Names of the nodes that depend on `name`, itself left out."""
    return {node.name for node in nodes(config) if name in ancestors(config, node.name)}
