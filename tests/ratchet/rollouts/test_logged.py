"""What TRL and wandb really write is what the rollouts stage reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.config.run import PromptConfig, PromptFormat, RolloutsConfig, SourceConfig
from ratchet.places import DATA
from ratchet.prompts import messages
from ratchet.questions.load import load_source
from ratchet.store.schemas import read_table
from ratchet.verifier import verify
from tasks.stages import rollouts as stage
from tests.support.made_up import Rows, artifact, context, question

pytestmark = pytest.mark.slow

SEEDLING = DATA / "seedling"
STEPS, GROUP, BATCH = 4, 4, 16


def asked() -> Rows:
    source = SourceConfig.model_validate({"kind": "symbolic", "count": 16, "seed": 11})
    return [
        question(item.question_id, question=item.question, gold=item.gold)
        for item in load_source(source, "train")
    ]


def accuracy_reward(completions: list[Any], gold: list[str], **columns: Any) -> list[float]:
    texts = [messages[0]["content"] for messages in completions]
    return [
        float(verify(text, right, "tags").lenient) for text, right in zip(texts, gold, strict=True)
    ]


def partial_reward(completions: list[Any], **columns: Any) -> list[float | None]:
    """Doesn't apply to the first: TRL logs NaN."""
    return [None if index == 0 else 0.1 for index, _ in enumerate(completions)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real TRL run, each batch used for two steps, with wandb offline."""
    import wandb
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path_factory.mktemp("trl")
    rows = [
        {"prompt": messages(PromptFormat.TAGS_SHORT, row["question"]), "gold": row["gold"]}
        for row in asked()
    ]
    settings = {
        "per_device_train_batch_size": BATCH,
        "num_generations": GROUP,
        "num_iterations": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "max_completion_length": 48,
        "log_completions": True,
        "num_completions_to_print": 0,
        "report_to": ["wandb"],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }
    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(console="off"))
    GRPOTrainer(
        str(SEEDLING),
        [accuracy_reward, partial_reward],
        args=GRPOConfig(output_dir=str(folder / "out"), **settings),
        train_dataset=Dataset.from_list(rows),
    ).train()
    run.finish()
    return folder


def run_stage(folder: Path, path: Path, **settings: Any) -> tuple[Rows, dict[str, Any]]:
    folder.mkdir()
    questions = artifact(
        folder / "questions",
        "decontaminate",
        {"questions": asked()},
        summary={"prefilled": ""},
    )
    ctx = context(folder, {"questions": questions})
    result = stage.run(
        ctx,
        prompt=PromptConfig(format=PromptFormat.TAGS_SHORT),
        rollouts=RolloutsConfig(path=str(path), **settings),
    )
    return read_table(ctx.out_dir / "scores.parquet", "scores").to_pylist(), result.summary


def test_trl_files_and_wandb_tables_select_alike(logged: Path, tmp_path: Path) -> None:
    from_trl, summary = run_stage(tmp_path / "trl", logged / "out")
    # two batches of 16, each logged by two steps; groups of 4 of 8 questions
    assert len(from_trl) == 2 * BATCH and summary["num_repeated"] == 2 * BATCH
    assert summary["num_questions"] == 2 * BATCH // GROUP
    assert summary["num_other_questions"] == 0 and summary["num_tables"] == STEPS
    assert 0 < summary["lenient"] < 1

    # wandb's folder of runs: the last table is logged twice, at its step and when training ends
    from_wandb, found = run_stage(tmp_path / "wandb", logged / "wandb")
    assert from_wandb == from_trl and found["num_tables"] == STEPS + 1
    (offline,) = (logged / "wandb").glob("offline-run-*")
    assert run_stage(tmp_path / "offline", offline)[0] == from_trl

    # TRL's own accuracy, as it logged it, says the same as verifying the texts now
    by_reward, _ = run_stage(tmp_path / "reward", logged / "out", reward="accuracy_reward")
    assert [row["lenient"] for row in by_reward] == [row["lenient"] for row in from_trl]
