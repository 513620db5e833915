"""Export of a model trained with an adapter: whole and adapter, both loaded again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from ratchet.errors import UserError
from ratchet.store.schemas import to_table, write_table
from ratchet.store.store import Artifact, Store
from tasks.commands.export import export
from tests.conftest import REPO
from tests.support.made_up import artifact, question

SEEDLING = REPO / "data" / "seedling"
CONFIG = {
    "model": {"path": "/secret/place", "dtype": "float32", "revision": None},
    "prompt": {"format": "tags_short"},
    "grpo": {"steps": 40},
}


def commit(store: Store, stage: str, key: str, fill: dict[str, Any], **fields: Any) -> Artifact:
    """Commit an artifact; `fill` maps names to folders to copy or rows to write."""
    written = artifact(store.root / ".scratch", stage, {}, key=key, **fields).manifest
    with store.build(stage, key) as build:
        for name, content in fill.items():
            if isinstance(content, Path):
                shutil.copytree(content, build.out_dir / name)
            else:
                write_table(build.out_dir / f"{name}.parquet", name, to_table(name, content))
        return store.commit(build, written)


def trained(folder: Path) -> tuple[Path, Path]:
    """(adapter, merged checkpoint) of the seedling with random LoRA weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tasks.models.checkpoints import save_checkpoint
    from tasks.sync.adapter import save_adapter

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, settings)
    save_adapter(model, folder / "adapter")
    merged = model.merge_and_unload()
    save_checkpoint(merged, AutoTokenizer.from_pretrained(SEEDLING), folder / "checkpoint")
    return folder / "adapter", folder / "checkpoint"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("export")
    store = Store(root / "store")
    adapter, checkpoint = trained(root / "trained")
    facts = {"source": "seedling", "path": str(SEEDLING)}
    model = commit(store, "model", "aa1", {}, summary=facts)
    (model.folder / "model.json").write_text(json.dumps(facts | {"revision": None}))
    asked = commit(store, "questions", "qq1", {"questions": [question(f"q{i}") for i in range(3)]})
    parents = {"model": model.as_parent(), "questions": asked.as_parent()}
    fill = {"adapter": adapter, "checkpoint": checkpoint}
    grpo = commit(store, "grpo", "bb1", fill, parents=parents, config=CONFIG)
    rl = commit(store, "evaluate", "ee1", {}, parents={"model": grpo.as_parent()})
    commit(
        store,
        "compare",
        "cc1",
        {},
        parents={"rl": rl.as_parent()},
        summary={"variant_order": ["baseline", "rl"]},
        markdown="- **better: made-up 1% → 2%**\n- **worse: other**\n\n| the | table |\n|---|---|",
    )
    return store


@pytest.mark.slow
def test_the_whole_model_is_what_base_and_adapter_say(store: Store, tmp_path: Path) -> None:
    check = export(store, "grpo/bb1", tmp_path / "whole", adapter=False)
    assert check.mean_difference < 1e-5
    assert check.num_tokens > 30
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    card = (tmp_path / "whole" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "- **better: made-up 1% → 2%**\n- **worse: other**\n\n| the | table |" in card
    assert "grpo.steps = 40" in card
    assert "| grpo | `bb1` |" in card
    assert "model `aa1`, questions `qq1`" in card
    assert "Answer in tags." in card
    assert "/secret" not in card
    assert str(REPO) not in card
    with pytest.raises(UserError, match="is in use"):
        export(store, "grpo/bb1", tmp_path / "whole", adapter=False)


@pytest.mark.slow
def test_the_adapter_comes_with_its_base_and_says_the_same(store: Store, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    to = tmp_path / "adapter"
    assert export(store, "grpo/bb1", to, adapter=True).mean_difference < 1e-5
    settings = json.loads((to / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(to / "base"), to)
    merged = AutoModelForCausalLM.from_pretrained(store.get("grpo", "bb1").path("checkpoint"))
    ids = AutoTokenizer.from_pretrained(to)("Mara has 3 marbles", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, merged(ids).logits, atol=1e-4)
    assert "library_name: peft" in (to / "README.md").read_text()


@pytest.mark.slow
def test_an_export_that_says_something_else_is_not_kept(store: Store, tmp_path: Path) -> None:
    # a checkpoint that lost its training: the base model's weights where the merged ones should be
    found = store.get("grpo", "bb1")
    fill = {"adapter": found.path("adapter"), "checkpoint": SEEDLING}
    parents = found.manifest.parents
    commit(store, "grpo", "bb2", fill, parents=parents, config=CONFIG)
    with pytest.raises(RuntimeError, match="the export is not the trained model"):
        export(store, "grpo/bb2", tmp_path / "lost", adapter=False)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ratchet"])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("x")
    found = store.get("grpo", "bb1")
    fill = {"checkpoint": found.path("checkpoint")}
    commit(store, "warmstart_sft", "ww1", fill, parents=found.manifest.parents, config=CONFIG)
    cases = {
        ("model/aa1", "new"): "holds no trained model",
        ("grpo/bb1", "used"): "is in use: name a new or empty folder",
        ("nothing", "new"): "names no artifact",
    }
    for (ref, to), message in cases.items():
        arguments = ["export", ref, "--to", str(tmp_path / to), "--store", str(store.root)]
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, UserError)
        assert message in str(done.exception)
    with pytest.raises(UserError, match="has no adapter, all its weights were trained"):
        export(store, "warmstart_sft/ww1", tmp_path / "new", adapter=True)
    (store.folder("warmstart_sft", "ww1") / "checkpoint" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is damaged \(checkpoint/config.json has"):
        export(store, "warmstart_sft/ww1", tmp_path / "new", adapter=False)
