"""Warm-start by on-policy distillation: the student answers, a teacher scores every token.

TRL's `DistillationTrainer` with `beta = 1`, the reverse KL divergence; what is added to it, vLLM as
the sampler included, is said in `tasks.warmstart.distillation_trainer`. Questions need no reference
solution. The order of the questions is laid out before training, so a resumed run only has to skip
ahead. The teacher's tokenizer must equal the student's (`tasks.warmstart.teacher`), and how well
the teacher itself answers the warm-up questions is measured first.

Not covered: a teacher, or a sampler, behind a server.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import DistillationConfig

from ratchet.config.run import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    SamplerConfig,
    WandbConfig,
    WarmstartConfig,
)
from ratchet.prompts import STYLE_OF, answer_start, prompt_ids
from tasks.models.checkpoints import load_model, load_tokenizer, model_location, stop_token_ids
from tasks.models.lora import lora_config
from tasks.runtime.context import StageContext, StageResult
from tasks.sampling.engines.base import EngineSpec
from tasks.training.wandb_run import wandb_run
from tasks.warmstart.data import training_order, warmup_questions
from tasks.warmstart.distillation_trainer import (
    GuardedDistillationTrainer,
    check_backend,
    drift_summary,
    drift_words,
    sampling_arguments,
    sampling_backend,
)
from tasks.warmstart.nan_guard import EXAMPLE, NanGuard, Setting
from tasks.warmstart.teacher import TeacherQuality, answer_greedily, load_teacher, quality
from tasks.warmstart.train import (
    EarlyStop,
    callbacks,
    early_stop,
    engine_spec,
    train,
    trainer_arguments,
)

ATTENTION = "eager"
"""Attention kernel of student and teacher, for the reason given in `tasks.stages.warmstart_sft`."""
NUM_TEACHER_QUESTIONS = 64
"""Warm-up questions on which the teacher is measured at most."""


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
    start = answer_start(tokenizer.decode(prompts[0], clean_up_tokenization_spaces=False))
    found = quality([start + answer for answer in answers], golds, STYLE_OF[prompt.format])
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
    spec: EngineSpec,
) -> DistillationConfig:
    """TRL's configuration. Its own shuffling is off: the rows lie in training order."""
    return DistillationConfig(
        **trainer_arguments(
            ctx,
            opd,
            "opd",
            model=model,
            num_steps=opd.steps,
            wandb=wandb,
        ),
        beta=opd.beta,
        temperature=opd.temperature,
        max_completion_length=sampler.max_completion_tokens,
        shuffle_dataset=False,
        **sampling_arguments(spec, sampler),
    )


def _trainer(
    ctx: StageContext,
    tokenizer: PreTrainedTokenizerBase,
    models: tuple[PreTrainedModel, PreTrainedModel],
    questions: list[dict[str, Any]],
    prompts: list[list[int]],
    *,
    model: ModelConfig,
    sampler: SamplerConfig,
    opd: OpdConfig,
    wandb: WandbConfig,
    early: EarlyStop | None,
) -> GuardedDistillationTrainer:
    """The trainer on (student, teacher), with its sampler."""
    spec = engine_spec(
        ctx,
        tokenizer,
        prompts,
        model=model,
        sampler=sampler,
        gpu_memory_utilization=opd.vllm_memory_utilization,
    )
    setting = Setting(
        method="opd",
        attention=ATTENTION,
        dtype=model.dtype,
        model=model_location(ctx.inputs["model"]).path,
        teacher=opd.teacher,
        teacher_revision=opd.teacher_revision,
        beta=opd.beta,
        temperature=opd.temperature,
    )
    student, teacher = models
    order = training_order(len(prompts), opd.steps * opd.batch_size, ctx.seed)
    with sampling_backend(ctx, opd.lora, sampler, spec):
        return GuardedDistillationTrainer(
            NanGuard(setting, [row["question_id"] for row in questions], ctx.work_dir),
            model.dtype,
            model=student,
            teacher_model=teacher,
            args=_settings(ctx, model, sampler, opd, wandb, spec),
            train_dataset=Dataset.from_list([{EXAMPLE: i, "prompt": prompts[i]} for i in order]),
            processing_class=tokenizer,
            peft_config=lora_config(opd.lora),
            callbacks=callbacks(ctx, early),
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
    check_backend(opd.lora, sampler)
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
    texts = [
        tokenizer.decode(ids, clean_up_tokenization_spaces=False) + row["gold"]
        for ids, row in zip(prompts, questions, strict=True)
    ]
    with wandb_run(ctx, "warmstart_opd", wandb, opd.model_dump(mode="json")) as wandb_place:
        early = early_stop(ctx, opd, tokenizer, model=model, prompt=prompt, sampler=sampler)
        trainer = _trainer(
            ctx,
            tokenizer,
            (student, teacher),
            questions,
            prompts,
            model=model,
            sampler=sampler,
            opd=opd,
            wandb=wandb,
            early=early,
        )
        try:
            trained = train(
                ctx, trainer, tokenizer, texts, dtype=model.dtype, attention=ATTENTION, early=early
            )
        finally:
            trainer.close()
    lengths = [row["completions/mean_length"] for row in trained.rows]
    drift = drift_summary(trained.rows)
    return StageResult(
        summary={"num_questions": len(questions), "engine": sampler.engine}
        | measured.summary()
        | trained.summary()
        | drift,
        markdown=f"Distilled from {opd.teacher}, which itself answers {measured.strict:.3f} "
        f"strictly right ({measured.lenient:.3f} leniently) of {measured.num_questions} of the "
        f"{len(questions)} warm-up questions. {trained.words()} {drift_words(drift)}",
        sampled_tokens=sum(round(length * opd.batch_size) for length in lengths),
        device_seconds=trained.seconds,
        wandb_run=wandb_place,
    )
