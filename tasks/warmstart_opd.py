"""Warm-start by on-policy distillation: the student answers, a teacher scores every token.

TRL's `DistillationTrainer` with `beta = 1`, the reverse KL divergence. Prompts go in as token ids,
rendered as the sampler renders them; the student generates through transformers; questions need no
reference solution. The order of the questions is laid out before training, so a resumed run only
has to skip ahead. The teacher's tokenizer must equal the student's (`tasks.warmstart_teacher`),
and how well the teacher itself answers the warm-up questions is measured first.

Not covered: sampling through vLLM, a teacher behind a server.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import DistillationConfig, DistillationTrainer

from ratchet.config import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    SamplerConfig,
    WandbConfig,
    WarmstartConfig,
)
from ratchet.prompts import STYLE_OF, prompt_ids
from tasks.context import StageContext, StageResult
from tasks.lora import lora_config
from tasks.models import load_model, load_tokenizer, model_location, stop_token_ids
from tasks.wandb_run import wandb_run
from tasks.warmstart_data import training_order, warmup_questions
from tasks.warmstart_guard import EXAMPLE, NanGuard, Setting
from tasks.warmstart_run import (
    callbacks,
    train,
    trainer_arguments,
)
from tasks.warmstart_teacher import TeacherQuality, answer_greedily, load_teacher, quality

ATTENTION = "eager"
"""Attention kernel of student and teacher, for the reason given in `tasks.warmstart_sft`."""
NUM_CHECKPOINTS = 10
"""Checkpoints on the way; a killed run loses at most the steps after one."""
NUM_TEACHER_QUESTIONS = 64
"""Warm-up questions on which the teacher is measured at most."""


class GuardedDistillationTrainer(DistillationTrainer):
    """`DistillationTrainer` on token-id prompts, under a `NanGuard`."""

    def __init__(self, guard: NanGuard, **kwargs: Any) -> None:
        self.guard = guard
        super().__init__(**kwargs)

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict]:
        return prompts, None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output[EXAMPLE] = torch.tensor([row[EXAMPLE] for row in inputs])
        return output

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Loss of one micro-batch; the example indices stay with the guard."""
        loss = super().compute_loss(model, self.guard.see(inputs), *args, **kwargs)
        self.guard.check_loss(loss, self.state.global_step + 1, self.model)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.guard.check_gradient(norm, self.state.global_step + 1, self.model)
        return norm


def _teacher_quality(
    ctx: StageContext,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[dict[str, Any]],
    prompts: list[list[int]],
    *,
    prompt: PromptConfig,
    sampler: SamplerConfig,
) -> TeacherQuality:
    """The teacher's greedy answers to the first warm-up questions, verified."""
    golds = [row["gold"] for row in questions[:NUM_TEACHER_QUESTIONS]]
    answers = answer_greedily(
        teacher,
        tokenizer,
        prompts[:NUM_TEACHER_QUESTIONS],
        stop_ids=stop_token_ids(ctx.inputs["model"], tokenizer),
        max_tokens=sampler.max_completion_tokens,
        batch_size=min(sampler.max_num_seqs, NUM_TEACHER_QUESTIONS),
    )
    found = quality(answers, golds, STYLE_OF[prompt.format])
    ctx.log(
        f"teacher on {found.num_questions} warm-up questions, greedy: {found.strict:.3f} strict, "
        f"{found.lenient:.3f} lenient"
    )
    return found


def _models(
    ctx: StageContext, model: ModelConfig, opd: OpdConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Student in float32, on the CPU; teacher in the run's dtype, on the device."""
    assert opd.teacher is not None, "RunConfig requires a teacher for this stage"
    start = ctx.inputs["model"]
    student = load_model(start, dtype="float32", attention=ATTENTION)
    student.generation_config.eos_token_id = list(stop_token_ids(start, tokenizer))
    teacher = load_teacher(
        opd.teacher,
        opd.teacher_revision,
        tokenizer,
        vocab_size=student.config.get_text_config().vocab_size,
        dtype=model.dtype,
        attention=ATTENTION,
    )
    return student, teacher.to("cuda" if torch.cuda.is_available() else "cpu")


def _settings(
    ctx: StageContext,
    model: ModelConfig,
    sampler: SamplerConfig,
    opd: OpdConfig,
    wandb: WandbConfig,
) -> DistillationConfig:
    """TRL's configuration. Its own shuffling is off: the rows lie in training order."""
    return DistillationConfig(
        **trainer_arguments(
            ctx,
            opd,
            "opd",
            model=model,
            num_steps=opd.steps,
            num_checkpoints=NUM_CHECKPOINTS,
            wandb=wandb,
        ),
        beta=opd.beta,
        temperature=opd.temperature,
        max_completion_length=sampler.max_completion_tokens,
        shuffle_dataset=False,
    )


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    warmstart: WarmstartConfig,
    opd: OpdConfig,
    wandb: WandbConfig,
) -> StageResult:
    """Distil the teacher and write `checkpoint/`, with LoRA `adapter/`, and `metrics`."""
    questions = warmup_questions(ctx, warmstart.data)
    random.Random(ctx.seed).shuffle(questions)
    tokenizer = load_tokenizer(ctx.inputs["model"])
    prompts = [
        prompt_ids(tokenizer, prompt.format, row["question"], enable_thinking=model.enable_thinking)
        for row in questions
    ]
    student, teacher = _models(ctx, model, opd, tokenizer)
    measured = _teacher_quality(
        ctx, teacher, tokenizer, questions, prompts, prompt=prompt, sampler=sampler
    )
    order = training_order(len(prompts), opd.steps * opd.batch_size, ctx.seed)
    start = model_location(ctx.inputs["model"]).path
    guard = NanGuard(
        Setting("opd", ATTENTION, model.dtype, start, opd.teacher),
        [row["question_id"] for row in questions],
        ctx.work_dir,
    )
    texts = [
        tokenizer.decode(ids, clean_up_tokenization_spaces=False) + row["gold"]
        for ids, row in zip(prompts, questions, strict=True)
    ]
    with wandb_run(ctx, "warmstart_opd", wandb, opd.model_dump(mode="json")) as wandb_place:
        trainer = GuardedDistillationTrainer(
            guard,
            model=student,
            teacher_model=teacher,
            args=_settings(ctx, model, sampler, opd, wandb),
            train_dataset=Dataset.from_list([{EXAMPLE: i, "prompt": prompts[i]} for i in order]),
            processing_class=tokenizer,
            peft_config=lora_config(opd.lora),
            callbacks=callbacks(ctx),
        )
        trained = train(ctx, trainer, tokenizer, texts, dtype=model.dtype, attention=ATTENTION)
    lengths = [row["completions/mean_length"] for row in trained.rows]
    return StageResult(
        summary={"num_questions": len(questions)} | measured.summary() | trained.summary(),
        markdown=f"Distilled from {opd.teacher}, which itself answers {measured.strict:.3f} "
        f"strictly right ({measured.lenient:.3f} leniently) of {measured.num_questions} of the "
        f"{len(questions)} warm-up questions. {trained.words()}",
        sampled_tokens=sum(round(length * opd.batch_size) for length in lengths),
        device_seconds=trained.seconds,
        wandb_run=wandb_place,
    )
