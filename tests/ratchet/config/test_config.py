"""Configuration: presets, --set, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.config import load
from ratchet.config.load import build_config, from_record, load_config
from ratchet.config.presets import preset_gist, preset_names
from ratchet.config.run import RunConfig, SourceConfig
from ratchet.errors import UserError
from ratchet.pipeline.dag import ancestors, descendants, nodes, nodes_named
from ratchet.pipeline.stage import Node
from ratchet.pipeline.stages import STAGES

MINIMAL = {"questions": {"train": [{"kind": "symbolic"}], "test": [{"kind": "symbolic"}]}}


def minimal(*assignments: str) -> RunConfig:
    import copy

    return build_config(copy.deepcopy(MINIMAL), assignments)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is_for(name: str) -> None:
    config = load_config(name)
    assert config.name == name
    assert config.sampler.engine != "auto"
    assert len(preset_gist(name)) > 20
    assert from_record(config.model_dump(mode="json")) == config
    for planned in nodes(config):
        for section in STAGES[planned.stage].sections:
            assert section in RunConfig.model_fields


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("filter.kep_below=0.9", "did you mean 'keep_below'?"),
        ("filtre.keep_below=0.9", "did you mean 'filter'?"),
        ("filter.keep_below=high", "'filter.keep_below' = 'high': Input should be a valid number"),
        ("filter.keep_below=2", "less than or equal to 1"),
        ("prompt.format=boxes", "'tags_example'"),
        ("grpo.loss_type=gspo", "(allowed: 'dapo', 'grpo', 'bnpo', 'dr_grpo')"),
        ("questions.train.3.limit=5", "'3' is no index into a list of 1"),
        ("grpo.vllm_server_device=1", "needs grpo.vllm_mode = 'server'"),
        ("questions.train.0.limti=5", "did you mean 'limit'?"),
        ("filter.keep_below", "write --set path.to.field=value"),
        ("seed.x=1", "'seed' = {'x': 1}: Input should be a valid integer"),
        ("presample.k=6", "k=6 must be a multiple of k_block=8: set k_block too"),
        ("presample.k=1", "'presample.k' = 1: Input should be greater than or equal to 2"),
        ("filter.keep_above=1", "keep_above=1.0 must be smaller than keep_below=1.0"),
        ("grpo.group_size=1", "greater than or equal to 2"),
        ("grpo.top_p=0.9", "'grpo.top_p' is not to be set: RL samples from the policy itself"),
        ("grpo.micro_batch_size=7", "must divide prompts_per_step × group_size = 64"),
        ("sft.micro_batch_size=5", "sft.micro_batch_size=5 must divide sft.batch_size=16"),
        ("questions.test=[]", "at least 1 item"),
        ("warmstart.method=opd", "needs opd.teacher"),
        ("presample.after_warmstart=true", "warmstart.data = 'source'"),
        ("warmstart.data=source", "needs at least one source in questions.warmup"),
        ("model.max_model_len=600", "exceeds model.max_model_len = 600"),
        ("name=Big Run", "'name'"),
        ("name=latest", "always means the newest run"),
        ("grpo.learning_rate=inf", "'grpo.learning_rate' = inf: Input should be a finite number"),
        ("rewards.weights.exact_check=nan", "Input should be a finite number"),
    ],
)
def test_mistakes_are_named(assignment: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        minimal(assignment)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_set_reads_toml_values_and_plain_words() -> None:
    config = minimal(
        "seed=7", "model.path=seedling", "model.dtype='bfloat16'", "grpo.lora.enabled=false",
        "rewards.weights.exact_check=2", "questions.train.0.count=5",
    )  # fmt: skip
    assert config.seed == 7
    assert config.model.dtype == "bfloat16"
    assert config.grpo.lora.enabled is False
    assert config.rewards.weights == {"exact_check": 2.0}
    assert config.questions.train[0].count == 5


def test_unknown_preset_and_broken_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'demo'"):
        load_config("demoo")
    with pytest.raises(UserError, match="no configuration file"):
        load_config(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[model\npath = 3")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(str(tmp_path / "bad.toml"))


def test_paths_become_absolute_and_local_copies_stand_in_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "own.jsonl").write_text("{}")
    preset = tmp_path / "mine.toml"
    preset.write_text(
        '[[questions.train]]\nkind = "gsm8k"\n[[questions.train]]\nkind = "svamp"\n'
        '[[questions.test]]\nkind = "file"\npath = "own.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("mine.toml", data=tmp_path)
    assert config.name == "mine"
    assert config.questions.train[0].path == str(tmp_path / "gsm8k")
    assert config.questions.train[1].path is None
    assert config.questions.test[0].path == str(tmp_path / "own.jsonl")


def test_every_field_has_a_line_of_words() -> None:
    todo: list[type] = [RunConfig, SourceConfig]
    seen: set[type] = set()
    while todo:
        model = todo.pop()
        seen.add(model)
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields") and inner not in seen:
                todo.append(inner)
    assert len(seen) > 12


def only(config: RunConfig, name: str) -> Node:
    (found,) = nodes_named(config, name)
    return found


def test_the_dag_follows_the_warm_start() -> None:
    def names(*assignments: str) -> list[str]:
        return [node.name for node in nodes(minimal(*assignments))]

    wanted = [
        "model", "questions", "decontaminate", "presample", "score", "filter", "grpo",
        "evaluate.baseline", "evaluate.rl", "compare", "report",
    ]  # fmt: skip
    found = names("warmstart.method=none")
    assert [name for name in found if name in wanted] == wanted
    assert not {"warmstart", "headroom", "audit", "evaluate.warmstart"} & set(found)
    dropped = minimal()
    assert only(dropped, "warmstart").inputs["selection"] == "filter"
    assert only(dropped, "presample").inputs["model"] == "model"
    assert only(dropped, "grpo").inputs["model"] == "warmstart"
    tree = {"questions": {**MINIMAL["questions"], "warmup": [{"kind": "symbolic"}]}}
    resampled = build_config(tree, ["warmstart.data=source", "presample.after_warmstart=true"])
    order = [node.name for node in nodes(resampled)]
    assert order.index("warmstart") < order.index("presample")
    assert only(resampled, "presample").inputs["model"] == "warmstart"
    assert "filter" not in ancestors(resampled, "warmstart")
    assert descendants(resampled, "compare") == {"report"}


def test_the_dag_follows_the_rollouts_and_the_gate() -> None:
    logged = minimal("rollouts.path=folder", "headroom.min_live_share=0.2")
    names = [node.name for node in nodes(logged)]
    wanted = ["rollouts", "filter", "headroom", "warmstart", "grpo"]
    assert [name for name in names if name in wanted] == wanted
    assert not {"presample", "score"} & set(names)
    assert only(logged, "filter").inputs["scores"] == "rollouts"
    assert only(logged, "rollouts").given == {}
    # the gate comes before what it guards, and enters no key of it
    assert only(logged, "warmstart").after == only(logged, "grpo").after == ("headroom",)
    ours = minimal(f"rollouts.path=grpo/{'ab' * 10}", "warmstart.method=none")
    assert only(ours, "rollouts").given == {"rollouts": ("grpo", "ab" * 10)}
    tree = {"questions": {**MINIMAL["questions"], "warmup": [{"kind": "symbolic"}]}}
    settings = ["warmstart.data=source", "presample.after_warmstart=true", "rollouts.path=x"]
    order = [node.name for node in nodes(build_config(tree, settings))]
    assert order.index("filter") < order.index("warmstart")  # nothing is sampled after it


def test_records_of_earlier_runs_keep_what_was_renamed() -> None:
    record = minimal().model_dump(mode="json")
    record["filter"]["min_live_share"] = 0.3
    record["questions"]["decontaminate_words"] = 8
    del record["headroom"], record["decontaminate"]
    found = from_record(record)
    assert (found.headroom.min_live_share, found.decontaminate.words) == (0.3, 8)


def test_node_names_are_checked() -> None:
    config = minimal()
    assert only(config, "warmstart_sft").name == "warmstart"
    assert [node.name for node in nodes_named(config, "evaluate")] == [
        "evaluate.baseline", "evaluate.warmstart", "evaluate.rl",
    ]  # fmt: skip
    assert only(config, "evaluate.rl").inputs["model"] == "grpo"
    with pytest.raises(UserError, match="has no stage 'train'"):
        nodes_named(config, "train")


def test_renamed_settings_work_and_are_hinted_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load._hint.cache_clear()
    preset = tmp_path / "old.toml"
    preset.write_text(
        '[filter]\nmin_live_share = 0.3\n[[questions.train]]\nkind = "symbolic"\n'
        '[[questions.test]]\nkind = "symbolic"\n'
    )
    assert load_config(str(preset)).headroom.min_live_share == 0.3
    assert load_config(str(preset), ["filter.min_live_share=0.4"]).headroom.min_live_share == 0.4
    section = load_config("demo", ["filter={min_live_share=0.2}"])
    assert section.headroom.min_live_share == 0.2
    hint = capsys.readouterr().err
    assert hint.count("\n") == 1
    assert "'filter.min_live_share' is now 'headroom.min_live_share'" in hint
    preset.write_text(preset.read_text() + "[headroom]\nmin_live_share = 0.5\n")
    with pytest.raises(UserError, match="both are set: leave out"):
        load_config(str(preset))
