"""Reinforcement learning on verifiable rewards: TRL's `GRPOTrainer`, LoRA or all weights.

Where the run samples with vLLM, completions come from an engine in the trainer's process (also on a
CPU) or from a server that the stage starts; from the trainer's own model otherwise. Weights reach
vLLM as an adapter version, or all of them (`tasks.sync`). One optimizer step uses
`prompts_per_step` groups. What each part adds to TRL is said in `tasks.rl.trainer`.

A killed run continues from its newest complete checkpoint (`tasks.resume`) and, but for vLLM in a
server, repeats the steps after it exactly: data order, sampling seeds and optimizer state are
functions of the seed and the step. A run that the drift guard halts has saved the policy before
the doubtful batch.

The result is the checkpoint that did best on dev questions (`tasks.dev_check`), the last one where
there are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from ratchet.config import (
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.step_records import StepRecords
from tasks.context import StageContext, StageResult
from tasks.dev_check import DevQuestions, best_step, dev_questions, policy_of
from tasks.lora import lora_config
from tasks.models import load_tokenizer
from tasks.resume import newest_checkpoint
from tasks.rl.budget import tokens_of
from tasks.rl.build import Sections, build_trainer
from tasks.rl.data import build_prompts, rl_questions
from tasks.rl.finish import NUM_FIXED_TEXTS, markdown, save_policy, summarise
from tasks.rl.trainer import RolloutTrainer
from tasks.rl.watch import Watch
from tasks.wandb_run import wandb_run


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    rewards: RewardsConfig,
    grpo: GrpoConfig,
    guard: GuardConfig,
    wandb: WandbConfig,
) -> StageResult:
    """Train and write `checkpoint/`, with LoRA `adapter/`, and the tables `metrics`, `rollouts`."""
    sections = Sections(model, prompt, sampler, rewards, grpo, guard, wandb)
    questions = rl_questions(ctx.inputs)
    tokenizer = load_tokenizer(ctx.inputs["model"])
    prompts = build_prompts(questions, tokenizer, prompt, enable_thinking=model.enable_thinking)
    ctx.log(f"{len(questions)} questions, {grpo.steps} steps of {grpo.prompts_per_step} groups")
    records = StepRecords(ctx.work_dir / "steps")
    watch = Watch(ctx, grpo.steps, records, sections.as_json(), _adapter(grpo))
    settings = {"grpo": grpo.model_dump(mode="json"), "rewards": rewards.model_dump(mode="json")}
    with wandb_run(ctx, "grpo", wandb, settings) as wandb_place:
        dev = _dev(ctx, sections, tokenizer)
        trainer = build_trainer(ctx, sections, tokenizer, prompts, records, watch, dev)
        try:
            _train(ctx, trainer, records, grpo.max_tokens)
        finally:
            if trainer.use_vllm:
                trainer.vllm_generation.close()

    rows, rollouts = records.metrics(), records.rollouts()
    last = records.rollouts_of(rollouts.column("step")[-1].as_py())[:NUM_FIXED_TEXTS]
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    best = best_step(rows)
    if best is not None and best != rows[-1]["step"]:
        ctx.log(f"the policy of step {best} did best on the dev questions and is kept")
        policy = policy_of(policy, Path(trainer.args.output_dir), best)
    check = save_policy(
        policy,
        tokenizer,
        ctx.out_dir,
        [row["prompt"] + row["completion"] for row in last],
        dtype=model.dtype,
    )
    ctx.write_table("metrics", rows)
    ctx.write_table("rollouts", rollouts)
    num_tokens = sum(rollouts.column("num_tokens").to_pylist())
    summary = {
        "num_questions": len(questions),
        "engine": sampler.engine,
        **summarise(rows, num_tokens),
        **check.summary(),
        "drift_warnings": trainer.oversight.guard.num_warnings,
    }
    return StageResult(
        summary=summary,
        markdown=markdown(summary),
        sampled_tokens=num_tokens,
        device_seconds=summary["train_seconds"],
        wandb_run=wandb_place,
    )


def _dev(
    ctx: StageContext, sections: Sections, tokenizer: PreTrainedTokenizerBase
) -> DevQuestions | None:
    """The questions that choose the checkpoint; none where several processes train."""
    if PartialState().num_processes > 1:
        ctx.log("several processes train: no dev check, the last policy is the result")
        return None
    return dev_questions(
        ctx.inputs,
        tokenizer,
        sections.model,
        sections.prompt,
        count=sections.grpo.dev_questions,
        max_tokens=sections.sampler.max_completion_tokens,
    )


def _adapter(grpo: GrpoConfig) -> dict[str, Any] | None:
    """The adapter's configuration as the doctor reads it."""
    found = lora_config(grpo.lora)
    return None if found is None else found.to_dict()


def _train(
    ctx: StageContext, trainer: RolloutTrainer, records: StepRecords, max_tokens: int | None
) -> None:
    """Train to the end, from the newest complete checkpoint if there is one."""
    start: Path | None = newest_checkpoint(Path(trainer.args.output_dir))
    if start is not None:
        ctx.log(f"continuing from {start.name}")
    done = 0 if start is None else int(start.name.split("-")[1])
    records.forget_after(done)
    if max_tokens is not None and tokens_of(records.metrics()) >= max_tokens:
        trainer._load_from_checkpoint(str(start))  # it died after its last step
        return
    trainer.oversight.guard.first_drift = records.first("drift_mean")
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
