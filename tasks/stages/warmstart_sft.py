"""Warm-start by supervised fine-tuning on reference solutions in the run's format, on the model's
own right samples (`tasks.warmstart.rejection_sampling`), or on both.

TRL's `SFTTrainer` on examples tokenised here (`tasks.warmstart.data`), in an order laid out before
training, one beside the other in a batch (no packing). Its fused head computes the loss without
holding all logits. Loss is on the answer and the end-of-turn token only. Eager attention and
float32 master weights are the default because a known batch has NaN gradients through SDPA in
bfloat16, and only there; whatever the setting, the first non-finite loss or gradient stops the
stage (`tasks.warmstart.nan_guard`).

The checkpoint that does best on dev questions is the result (`tasks.warmstart.train`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig as TrlSftConfig
from trl import SFTTrainer

from ratchet.config.run import (
    ModelConfig,
    PromptConfig,
    SamplerConfig,
    SftConfig,
    WandbConfig,
    WarmstartConfig,
)
from tasks.models.checkpoints import load_model, load_tokenizer, model_location
from tasks.models.lora import lora_config
from tasks.runtime.context import StageContext, StageResult
from tasks.training.dev_check import DevCheckCallback
from tasks.training.wandb_run import wandb_run
from tasks.warmstart.data import (
    IGNORED,
    Example,
    build_examples,
    by_length_within_batches,
    warmup_questions,
)
from tasks.warmstart.nan_guard import EXAMPLE, Guarded, NanGuard, Setting
from tasks.warmstart.rejection_sampling import mixed_order, right_samples
from tasks.warmstart.train import callbacks, dev_check, train, trainer_arguments


class GuardedSftTrainer(Guarded, SFTTrainer):
    """`SFTTrainer` under a `NanGuard`."""

    def __init__(self, guard: NanGuard, **kwargs: Any) -> None:
        self.guard = guard
        super().__init__(**kwargs)


class Collator:
    """Pads rows `{example, input_ids, labels}` on the right."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors of shape (rows, longest); `example` of shape (rows,)."""
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

        return {
            "input_ids": padded("input_ids", self.pad_id),
            "labels": padded("labels", IGNORED),
            "attention_mask": torch.tensor(
                [
                    [1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"]))
                    for row in rows
                ]
            ),
            EXAMPLE: torch.tensor([row[EXAMPLE] for row in rows]),
        }


def dataset(examples: list[Example], order: list[int]) -> Dataset:
    """Rows for the trainer, in training order."""
    return Dataset.from_list(
        [
            {EXAMPLE: i, "input_ids": examples[i].input_ids, "labels": examples[i].labels}
            for i in order
        ]
    )


@dataclass(frozen=True)
class TrainingData:
    """What is learnt from."""

    examples: list[Example]
    order: list[int]
    """Indices of examples as they are trained on."""
    counts: dict[str, int]
    """Figures for the stage's summary."""
    description: str
    """The same for people."""


def _trainer(
    ctx: StageContext,
    arguments: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    data: TrainingData,
    sft: SftConfig,
    dtype: str,
    check: DevCheckCallback | None,
) -> GuardedSftTrainer:
    """The trainer on the starting model."""
    start = ctx.inputs["model"]
    # Padding is masked everywhere, so any token will do where the tokenizer names none.
    pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    return GuardedSftTrainer(
        NanGuard(
            Setting("sft", sft.attention, dtype, model_location(start).path),
            [example.question_id for example in data.examples],
            ctx.work_dir,
        ),
        model=load_model(start, dtype="float32", attention=sft.attention),
        args=TrlSftConfig(
            **arguments,
            max_length=None,  # examples that are too long were left out, none is cut
            dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="sequential",
        ),
        train_dataset=dataset(data.examples, data.order),
        data_collator=Collator(pad_id),
        processing_class=tokenizer,
        peft_config=lora_config(sft.lora),
        callbacks=callbacks(ctx, check),
    )


def _training_data(
    ctx: StageContext,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[dict[str, Any]],
    *,
    prompt: PromptConfig,
    enable_thinking: bool,
    sft: SftConfig,
) -> TrainingData:
    """Examples of `questions` and the order to train on them; UserError when there are none."""
    references: list[Example] = []
    samples: list[Example] = []
    counts: dict[str, int] = {}
    parts: list[str] = []
    if sft.reference_weight:
        found = build_examples(
            questions,
            tokenizer,
            prompt.format,
            enable_thinking=enable_thinking,
            max_length=sft.max_length,
            limit=sft.max_examples,
        )
        references = found.examples
        counts = {
            "num_without_solution": found.num_without_solution,
            "num_too_long": found.num_too_long,
        }
        parts.append(
            f"{len(references)} reference solutions ({found.num_without_solution} questions have "
            f"none, {found.num_too_long} are too long)"
        )
    if sft.samples != "none":
        drawn = right_samples(
            ctx, questions, tokenizer, prompt.format, sft, enable_thinking=enable_thinking
        )
        samples = drawn.examples
        counts |= drawn.summary()
        parts.append(
            f"{len(samples)} right samples ({sft.samples}) of {drawn.num_questions} questions "
            f"({drawn.num_right_elsewhere} right ones are in another format, "
            f"{drawn.num_too_long} chosen ones too long)"
        )
    examples = references + samples
    order = mixed_order(len(references), len(samples), sft, ctx.seed)
    order = by_length_within_batches(order, [len(e.input_ids) for e in examples], sft.batch_size)
    counts |= {
        "num_examples": len(examples),
        "num_answer_tokens": sum(len(examples[i].answer_ids) for i in order),
    }
    return TrainingData(examples, order, counts, " and ".join(parts))


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    warmstart: WarmstartConfig,
    sft: SftConfig,
    wandb: WandbConfig,
) -> StageResult:
    """Fine-tune the model and write `checkpoint/`, with LoRA `adapter/`, and `metrics`."""
    questions = warmup_questions(ctx, warmstart.data)
    random.Random(ctx.seed).shuffle(questions)
    tokenizer = load_tokenizer(ctx.inputs["model"])
    data = _training_data(
        ctx,
        tokenizer,
        questions,
        prompt=prompt,
        enable_thinking=model.enable_thinking,
        sft=sft,
    )
    num_steps = math.ceil(len(data.order) / sft.batch_size)
    ctx.log(f"{num_steps} steps on {data.description}")
    texts = [
        tokenizer.decode(example.input_ids, clean_up_tokenization_spaces=False)
        for example in data.examples
    ]
    with wandb_run(ctx, "warmstart_sft", wandb, sft.model_dump(mode="json")) as wandb_place:
        arguments = trainer_arguments(ctx, sft, model=model, num_steps=num_steps, wandb=wandb)
        check = dev_check(ctx, sft, tokenizer, model=model, prompt=prompt, sampler=sampler)
        trainer = _trainer(ctx, arguments, tokenizer, data, sft, model.dtype, check)
        trained = train(
            ctx, trainer, tokenizer, texts, dtype=model.dtype, attention=sft.attention, check=check
        )
    return StageResult(
        summary=data.counts | trained.summary(),
        markdown=f"Fine-tuned on {data.description}. {trained.describe()}",
        device_seconds=trained.seconds,
        wandb_run=wandb_place,
    )
