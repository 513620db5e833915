"""Further variants and controls: in the configuration, in the plan, and their rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.config.load import load_config
from ratchet.config.run import Control, PromptFormat, RewardsConfig
from ratchet.errors import UserError
from ratchet.pipeline.controls import coin, control_rewards
from ratchet.pipeline.plan import make_plan
from ratchet.pipeline.request import Request, prepare
from ratchet.store.store import Store
from tests.conftest import REPO

SEEDLING = str(REPO / "data" / "seedling")


def test_further_variants_and_controls_are_nodes_and_leave_the_others_as_they_were(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    plain = make_plan(load_config("demo"), store)
    variants = f'evaluate.variants=[{{name="old-one", path="{SEEDLING}"}}]'
    config = load_config("demo", [variants, 'evaluate.controls=["random-reward"]'])
    plan = make_plan(config, store)
    names = [planned.node.name for planned in plan.nodes]
    assert set(names) - {planned.node.name for planned in plain.nodes} == {
        "model.old-one", "grpo.random-reward", "evaluate.old-one", "evaluate.random-reward",
    }  # fmt: skip
    for name in ("model", "presample", "grpo", "evaluate.baseline", "evaluate.rl"):
        assert plan.named(name).key == plain.named(name).key, name
    assert plan.named("compare").key != plain.named("compare").key
    assert plan.named("compare").node.inputs["old-one"] == "evaluate.old-one"
    assert set(plan.named("report").node.inputs) == set(names) - {"report"}

    control = plan.named("grpo.random-reward")
    assert control.node.inputs == plan.named("grpo").node.inputs
    assert control.sections["rewards"] == {"weights": {"ratchet.pipeline.controls:coin": 1.0}}
    assert control.sections["grpo"] == plan.named("grpo").sections["grpo"]
    assert "reward ratchet.pipeline.controls:coin" in control.fingerprints

    other = plan.named("model.old-one")
    assert other.sections["model"]["path"] == SEEDLING
    assert plan.named("evaluate.old-one").sections["model"]["path"] == SEEDLING
    assert plan.named("evaluate.old-one").node.inputs["model"] == "model.old-one"


def test_bad_variants_are_refused_before_anything_runs(tmp_path: Path) -> None:
    def refused(assignment: str) -> str:
        with pytest.raises(UserError) as error:
            prepare(Request("demo", None, [assignment], None, None, tmp_path), [], [], "ratchet")
        return str(error.value)

    assert "variant name 'rl' is taken" in refused(
        'evaluate.variants=[{name="rl", path="seedling"}]'
    )
    twice = 'evaluate.variants=[{name="a", path="seedling"}, {name="a", path="seedling"}]'
    assert "two variants are called 'a'" in refused(twice)
    gone = refused('evaluate.variants=[{name="a", path="/no/such/model"}]')
    assert gone.startswith("evaluate.variants 'a': ")
    assert "no folder /no/such/model" in gone
    assert "'random-reward', 'format-reward'" in refused('evaluate.controls=["random"]')
    test = 'questions.test=[{kind="symbolic"}, {kind="symbolic", seed=2}]'
    assert "two sources of questions.test are called 'symbolic'" in refused(test)
    assert not (tmp_path / "runs").exists()


def test_the_coin_is_fair_repeatable_and_blind_to_the_text() -> None:
    same = coin(["the same text"] * 2000, gold=["4"] * 2000)
    assert same == coin(["the same text"] * 2000)
    assert set(same) == {0.0, 1.0}
    assert 900 < sum(value or 0.0 for value in same) < 1100  # 4.5 standard deviations
    assert coin(["another text"] * 50) != same[:50]


def test_the_format_control_keeps_what_does_not_see_the_answer() -> None:
    default = control_rewards(Control.FORMAT, RewardsConfig(), PromptFormat.TAGS_SHORT)
    assert default.weights == {"format_check": 0.5, "tag_check": 1.0, "solution_number_check": 0.25}
    boxed = control_rewards(Control.FORMAT, RewardsConfig(), PromptFormat.BOXED)
    assert boxed.weights == {"boxed_format": 0.1}
    own = RewardsConfig(weights={"exact_check": 1.0, "tag_check": 0.3})
    found = control_rewards(Control.FORMAT, own, PromptFormat.TAGS)
    assert found.weights == {"tag_check": 0.3}
    with pytest.raises(UserError, match="needs a reward for the format"):
        control_rewards(Control.FORMAT, RewardsConfig(weights={"exact_check": 1.0}), "tags")
