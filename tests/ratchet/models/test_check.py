"""What a model folder must hold, and what identifies a model."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from ratchet.config.run import ModelConfig
from ratchet.errors import UserError
from ratchet.models import check as model_check
from ratchet.models.check import Kind


def write_safetensors(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file with zeros; two bytes a number."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for axis in shape:
            size *= axis
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(at))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that passes all checks."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "max_position_embeddings": 256, "vocab_size": 7}'
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", {"a": [3, 4], "b": [5], "c": []})
    return tmp_path


def test_a_complete_folder_passes(folder: Path) -> None:
    model_check.check_model_dir(folder)
    model_check.check_model(ModelConfig(path=str(folder)))
    assert model_check.num_parameters(folder) == 3 * 4 + 5 + 1


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", r"has no tokenizer \(tokenizer.json\)"),
        ("model.safetensors", r"has no weights \(model.safetensors\)"),
    ],
)
def test_what_is_missing_is_named(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(UserError, match=message):
        model_check.check_model(ModelConfig(path=str(folder)))


def test_a_tokenizer_may_come_as_vocabulary_and_merges(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(UserError, match="no tokenizer"):
        model_check.check_model_dir(folder)
    (folder / "merges.txt").write_text("")
    model_check.check_model_dir(folder)


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights only"):
        model_check.check_model_dir(folder)


def test_a_missing_shard_is_named_and_shards_are_summed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(folder / "m-1.safetensors", {"a": [2, 2]})
    with pytest.raises(UserError, match=r"lacks 1 of 2 weight files \(m-2.safetensors\)"):
        model_check.check_model_dir(folder)
    write_safetensors(folder / "m-2.safetensors", {"b": [3]})
    model_check.check_model_dir(folder)
    assert model_check.num_parameters(folder) == 7


def test_a_cut_off_weight_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 5)
    with pytest.raises(UserError, match="no safetensors file"):
        model_check.num_parameters(folder)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("seedling", Kind.PACKAGED),
        ("smollm2-135m-instruct", Kind.PACKAGED),
        ("Qwen/Qwen3-0.6B", Kind.HUB),
        ("gpt2", Kind.HUB),
    ],
)
def test_kinds(path: str, kind: Kind) -> None:
    assert model_check.kind_of(path) is kind


def test_an_existing_relative_folder_is_local(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert model_check.kind_of(folder.name) is Kind.LOCAL


@pytest.mark.parametrize("path", ["/no/such/folder", "./absent", "a/b/c", "what is this"])
def test_names_that_can_be_no_model(path: str) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        model_check.check_model(ModelConfig(path=path))


def test_a_revision_is_for_hub_models_only(folder: Path) -> None:
    with pytest.raises(UserError, match=r"model\.revision is for hub models"):
        model_check.check_model(ModelConfig(path=str(folder), revision="main"))


def test_fingerprint_follows_contents_not_place_or_time(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(folder))
    first = model_check.fingerprint(model)
    assert model_check.fingerprint(model) == first
    os.utime(folder / "config.json", (1, 1))
    (folder / "README.md").write_text("words")
    assert model_check.fingerprint(model) == first
    write_safetensors(folder / "model.safetensors", {"a": [3, 4], "b": [6]})
    assert model_check.fingerprint(model) != first


def test_fingerprint_of_a_hub_model_is_its_name_and_revision() -> None:
    assert model_check.fingerprint(ModelConfig(path="a/b")) == "a/b@main"
    assert model_check.fingerprint(ModelConfig(path="a/b", revision="v1")) == "a/b@v1"


def test_context_limit_is_the_smaller_one(folder: Path) -> None:
    path = str(folder)
    assert model_check.context_limit(ModelConfig(path=path)) == 256
    assert model_check.context_limit(ModelConfig(path=path, max_model_len=100)) == 100
    assert model_check.context_limit(ModelConfig(path="a/b")) is None


def test_context_of_a_model_that_sees_is_its_language_parts() -> None:
    nested = {"model_type": "x", "text_config": {"max_position_embeddings": 99}}
    assert model_check.context_length(nested) == 99
    assert model_check.context_length({"model_type": "x"}) is None


def test_chat_template_in_either_place(folder: Path) -> None:
    assert not model_check.has_chat_template(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert model_check.has_chat_template(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    assert model_check.has_chat_template(folder)
