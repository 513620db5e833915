"""Preset files: what they may extend, and that the shipped ones say each thing once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.load import _preset_tree, build_config, load_config
from ratchet.config.presets import preset_names, read_chain
from ratchet.errors import UserError
from ratchet.places import PRESETS

SOURCES = '[[questions.train]]\nkind = "symbolic"\n[[questions.test]]\nkind = "symbolic"\n'


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)


def settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every setting; a source's fields by its place in its list."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = list(enumerate(value))
    if not items:
        yield path, value
    for name, inner in items:
        yield from settings(inner, f"{path}.{name}" if path else str(name))


@pytest.mark.parametrize("file", sorted(PRESETS.rglob("*.toml")), ids=lambda file: file.name)
def test_no_preset_repeats_what_its_base_or_the_default_says(file: Path) -> None:
    own = read_chain(file)[-1]
    known: dict[str, Any] = {}
    for base in read_chain(file)[:-1]:
        known |= dict(settings(base))
    some = {
        role: [
            {"kind": source["kind"], "name": str(index)}
            for index, source in enumerate(own.get("questions", {}).get(role, ()))
        ]
        or [{"kind": "symbolic"}]
        for role in ("train", "warmup", "dev", "test")
    }
    whole = build_config({"questions": some}).model_dump(mode="json")
    demanded = (".kind", ".name")
    defaults = {name: value for name, value in settings(whole) if not name.endswith(demanded)}
    for name, value in settings(own):
        in_a_list = any(part.isdigit() for part in name.split("."))  # which is replaced as a whole
        said = defaults if in_a_list else defaults | known
        assert value != said.get(name), f"{name} is what the base or the default says"


def test_a_preset_may_extend_a_shipped_one_and_one_beside_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        house='extends = "demo"\nname = "house"\n[grpo]\nsteps = 7\n',
        mine='extends = "house.toml"\n[grpo]\ngroup_size = 16\n'
        '[[questions.train]]\nkind = "symbolic"\n',
    )
    found, demo = load_config(str(tmp_path / "mine.toml")), load_config("demo")
    assert (found.name, found.grpo.steps, found.grpo.group_size) == ("mine", 7, 16)
    assert found.grpo.learning_rate == demo.grpo.learning_rate
    assert found.questions.test == demo.questions.test
    assert found.questions.train != demo.questions.train  # a list is replaced as a whole
    assert found.presample == demo.presample


def test_a_preset_that_names_an_algorithm_changes_its_bases(tmp_path: Path) -> None:
    write(
        tmp_path,
        one=f'[grpo]\nalgorithm = "dapo"\nrefill_rounds = 9\n{SOURCES}',
        two='extends = "one.toml"\n[grpo]\nalgorithm = "gspo"\nepsilon = 1e-3\n',
    )
    grpo = load_config(str(tmp_path / "two.toml")).grpo
    assert (grpo.importance_sampling_level, grpo.epsilon) == ("sequence", 1e-3)
    assert grpo.refill_rounds == 0  # DAPO's


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grpo = 3\n", "grpo"),
        ("headroom = 3\n[filter]\nmin_live_share = 0.1\n", "headroom"),
        ("[grpo]\nalgorithm = 3\n", "grpo.algorithm"),
    ],
)
def test_a_value_where_a_table_belongs_is_named(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, mine=f'extends = "demo"\n{text}')
    with pytest.raises(UserError, match=words):
        load_config(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ('"b.toml"', "in a circle: a.toml → b.toml → a.toml"),
        ('"a.toml"', "in a circle: a.toml → a.toml"),
        ('"none.toml"', "extends = 'none.toml': no configuration file"),
        ('"dmo"', "extends = 'dmo': no preset 'dmo'; did you mean 'demo'?"),
        ("3", 'write extends = "PRESET"'),
    ],
)
def test_bases_that_lead_nowhere_are_named(tmp_path: Path, base: str, words: str) -> None:
    write(tmp_path, a=f"extends = {base}\n{SOURCES}", b='extends = "a.toml"\n')
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path / "a.toml"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bases_are_no_presets() -> None:
    assert not any("base" in name for name in preset_names())
    assert _preset_tree(PRESETS / "base" / "gpu-gsm8k.toml")["grpo"]["steps"] == 300
