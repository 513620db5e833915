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
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import DistillationConfig
from trl.trainer import distillation_trainer

from ratchet.config.run import (
    ModelConfig,
    OpdConfig,
    PromptConfig,
    SamplerConfig,
    WandbConfig,
    WarmstartConfig,
)
from tasks.models.checkpoints import load_model, load_tokenizer, model_location, stop_token_ids
from tasks.models.lora import lora_config
from tasks.runtime.context import StageContext, StageResult
from tasks.sampling.engines.base import EngineSpec
from tasks.sampling.engines.opening import engine_spec
from tasks.training.dev_check import DevCheckCallback, EvalSet, greedy_answers
from tasks.training.seeds import training_order
from tasks.training.vllm import sampling_backend, vllm_arguments
from tasks.training.wandb_run import wandb_run
from tasks.warmstart.data import warmup_questions
from tasks.warmstart.distillation_trainer import (
    GuardedDistillationTrainer,
    check_backend,
    describe_drift,
    drift_summary,
)
from tasks.warmstart.nan_guard import EXAMPLE, NanGuard, Setting
from tasks.warmstart.teacher import load_teacher
from tasks.warmstart.train import callbacks, dev_check, train, trainer_arguments

ATTENTION = "eager"
"""Attention kernel of student and teacher, for the reason given in `tasks.stages.warmstart_sft`."""
NUM_TEACHER_QUESTIONS = 64
"""Warm-up questions on which the teacher is measured at most."""


def _teacher_accuracy(
    ctx: StageContext, teacher: PreTrainedModel, eval_set: EvalSet, spec: EngineSpec
) -> tuple[float, float]:
    """The teacher's greedy answers, verified: shares of strictly and leniently right ones."""
    strict, lenient = eval_set.accuracy(greedy_answers(teacher, eval_set, spec))
    ctx.log(
        f"teacher on {len(eval_set.golds)} warm-up questions, greedy: {strict:.3f} strict, "
        f"{lenient:.3f} lenient"
    )
    return strict, lenient


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


def _trainer(
    ctx: StageContext,
    tokenizer: PreTrainedTokenizerBase,
    models: tuple[PreTrainedModel, PreTrainedModel],
    questions: list[dict[str, Any]],
    prompts: list[list[int]],
    spec: EngineSpec,
    *,
    model: ModelConfig,
    sampler: SamplerConfig,
    opd: OpdConfig,
    wandb: WandbConfig,
    check: DevCheckCallback | None,
) -> GuardedDistillationTrainer:
    """The trainer on (student, teacher), with its sampler."""
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
    settings = DistillationConfig(
        **trainer_arguments(ctx, opd, model=model, num_steps=opd.steps, wandb=wandb),
        beta=opd.beta,
        temperature=opd.temperature,
        max_completion_length=sampler.max_completion_tokens,
        shuffle_dataset=False,  # the rows lie in training order
        **(vllm_arguments(spec) if sampler.engine == "vllm" else {}),
    )
    student, teacher = models
    order = training_order(len(prompts), opd.steps * opd.batch_size, ctx.seed)
    adapter = opd.lora if opd.lora.enabled else None
    with sampling_backend(ctx, sampler, spec, adapter, distillation_trainer):
        return GuardedDistillationTrainer(
            NanGuard(setting, [row["question_id"] for row in questions], ctx.work_dir),
            model.dtype,
            model=student,
            teacher_model=teacher,
            args=settings,
            train_dataset=Dataset.from_list([{EXAMPLE: i, "prompt": prompts[i]} for i in order]),
            processing_class=tokenizer,
            peft_config=lora_config(opd.lora),
            callbacks=callbacks(ctx, check),
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
    asked = EvalSet.of(questions, tokenizer, model, prompt, sampler.max_completion_tokens)
    spec = replace(
        engine_spec(
            ctx.inputs["model"],
            tokenizer,
            model_config=model,
            sampler=sampler,
            max_prompt_tokens=max(map(len, asked.prompts)),
        ),
        gpu_memory_utilization=opd.vllm_memory_utilization,
    )
    student, teacher = _models(ctx, model, opd, tokenizer)
    count = min(NUM_TEACHER_QUESTIONS, len(questions))
    strict, lenient = _teacher_accuracy(ctx, teacher, asked.first(count), spec)
    texts = [
        tokenizer.decode(ids, clean_up_tokenization_spaces=False) + row["gold"]
        for ids, row in zip(asked.prompts, questions, strict=True)
    ]
    with wandb_run(ctx, "warmstart_opd", wandb, opd.model_dump(mode="json")) as wandb_place:
        check = dev_check(ctx, opd, tokenizer, model=model, prompt=prompt, sampler=sampler)
        trainer = _trainer(
            ctx,
            tokenizer,
            (student, teacher),
            questions,
            asked.prompts,
            spec,
            model=model,
            sampler=sampler,
            opd=opd,
            wandb=wandb,
            check=check,
        )
        try:
            trained = train(
                ctx, trainer, tokenizer, texts, dtype=model.dtype, attention=ATTENTION, check=check
            )
        finally:
            trainer.close()
    lengths = [row["completions/mean_length"] for row in trained.rows]
    drift = drift_summary(trained.rows)
    measured = {
        "teacher_num_questions": count,
        "teacher_strict": strict,
        "teacher_lenient": lenient,
    }
    return StageResult(
        summary={"num_questions": len(questions), "engine": sampler.engine}
        | measured
        | trained.summary()
        | drift,
        markdown=f"Distilled from {opd.teacher}, which itself answers {strict:.3f} strictly right "
        f"({lenient:.3f} leniently) of {count} of the {len(questions)} warm-up questions. "
        f"{trained.describe()} {describe_drift(drift)}",
        sampled_tokens=sum(round(length * opd.batch_size) for length in lengths),
        device_seconds=trained.seconds,
        wandb_run=wandb_place,
    )
