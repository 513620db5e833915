"""Reinforcement learning on verifiable rewards: TRL's `GRPOTrainer`, LoRA or all weights.

Where the run samples with vLLM, completions come from an engine in the trainer's process (also on a
CPU) or from a server that the stage starts; from the trainer's own model otherwise. Weights reach
vLLM as an adapter version, or all of them (`tasks.sync`). One optimizer step uses
`prompts_per_step` groups. What each part adds to TRL is said in `tasks.grpo.trainer`.

A killed run continues from its newest complete checkpoint (`tasks.training.resume`) and, but for
vLLM in a server, repeats the steps after it exactly: data order, sampling seeds and optimizer state
are functions of the seed and the step. A run that the drift guard halts has saved the policy before
the doubtful batch.

With `grpo.processes` above 1 the training runs in that many processes (`tasks.grpo.processes`).

The result is the checkpoint that did best on dev questions (`tasks.training.dev_check`), the last
one where there are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.rollouts.training_log import StepRecords
from tasks.grpo.before import check_before_loading
from tasks.grpo.budget import tokens_of
from tasks.grpo.build import build_trainer
from tasks.grpo.data import Prompts, build_prompts, rl_questions
from tasks.grpo.finish import NUM_FIXED_TEXTS, markdown, save_policy, summarise
from tasks.grpo.halt import lost_sampler
from tasks.grpo.processes import train_in_processes
from tasks.grpo.progress import Watch
from tasks.grpo.sections import Sections
from tasks.grpo.trainer import RolloutTrainer
from tasks.models.checkpoints import load_tokenizer
from tasks.models.lora import lora_config
from tasks.runtime.context import StageContext, StageResult
from tasks.sync.types import ServerError
from tasks.training.dev_check import best_step, dev_questions, policy_of
from tasks.training.resume import newest_checkpoint
from tasks.training.wandb_run import wandb_run


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
    tokenizer, prompts = prepare(ctx, sections)
    ctx.log(f"{len(prompts.rows)} questions, {grpo.steps} steps of {grpo.prompts_per_step} groups")
    check_before_loading(ctx, sections, prompts.longest)
    if grpo.processes > 1:
        return train_in_processes(ctx, sections)
    result = train(ctx, sections, tokenizer, prompts)
    assert result is not None
    return result


def prepare(ctx: StageContext, sections: Sections) -> tuple[PreTrainedTokenizerBase, Prompts]:
    """Tokenizer and questions; UserError for none."""
    questions = rl_questions(ctx.inputs)
    tokenizer = load_tokenizer(ctx.inputs["model"])
    thinking = sections.model.enable_thinking
    return tokenizer, build_prompts(questions, tokenizer, sections.prompt, enable_thinking=thinking)


def train(
    ctx: StageContext, sections: Sections, tokenizer: PreTrainedTokenizerBase, prompts: Prompts
) -> StageResult | None:
    """`run` in this process, or this one's part where several train; of those, the first writes
    everything but the others' rollouts and has the result."""
    model, grpo = sections.model, sections.grpo
    records = StepRecords(ctx.work_dir / "steps")
    watch = Watch(ctx, grpo.steps, records, sections.as_json(), _adapter(grpo))
    settings = {name: sections.as_json()[name] for name in ("grpo", "rewards")}
    with wandb_run(ctx, "grpo", sections.wandb, settings) as wandb_place:
        dev = dev_questions(
            ctx.inputs,
            tokenizer,
            model,
            sections.prompt,
            count=grpo.dev_questions,
            max_tokens=sections.sampler.max_completion_tokens,
        )
        trainer = build_trainer(ctx, sections, tokenizer, prompts, records, watch, dev)
        try:
            _train(ctx, trainer, records, grpo.max_tokens)
        finally:
            if trainer.use_vllm:
                trainer.vllm_generation.close()
    if not trainer.accelerator.is_main_process:
        return None
    return _finished(ctx, sections, tokenizer, trainer, records, len(prompts.rows), wandb_place)


def _finished(
    ctx: StageContext,
    sections: Sections,
    tokenizer: PreTrainedTokenizerBase,
    trainer: RolloutTrainer,
    records: StepRecords,
    num_questions: int,
    wandb_place: str | None,
) -> StageResult:
    """Write what training made."""
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
        dtype=sections.model.dtype,
    )
    ctx.write_table("metrics", rows)
    ctx.write_table("rollouts", rollouts)
    num_tokens = sum(rollouts.column("num_tokens").to_pylist())
    summary = {
        "num_questions": num_questions,
        "engine": sections.sampler.engine,
        **summarise(rows, num_tokens),
        **check.summary(),
        "drift_warnings": trainer.oversight.guard.num_warnings,
    }
    return StageResult(
        summary=summary,
        markdown=markdown(summary),
        sampled_tokens=num_tokens,
        device_seconds=summary["train_seconds"] * num_devices(sections.grpo, trainer),
        wandb_run=wandb_place,
    )


def num_devices(grpo: GrpoConfig, trainer: RolloutTrainer) -> int:
    """Devices that training keeps: a GPU for each process and for a server on one of its own;
    processes on a CPU share it."""
    if trainer.accelerator.device.type != "cuda":
        return 1
    apart = trainer.use_vllm and grpo.vllm_mode == "server" and grpo.vllm_server_device is not None
    return trainer.accelerator.num_processes + apart


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
    if trainer.accelerator.is_main_process:
        records.forget_after(done)
    trainer.accelerator.wait_for_everyone()
    if max_tokens is not None and tokens_of(records.metrics()) >= max_tokens:
        trainer._load_from_checkpoint(str(start))  # it died after its last step
        return
    trainer.oversight.guard.first_drift = records.first("drift_mean")
    try:
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    except ServerError as error:
        raise lost_sampler(trainer, error) from error
