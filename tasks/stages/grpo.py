"""Reinforcement learning on verifiable rewards: TRL's `GRPOTrainer`, LoRA or all weights.

Where the run samples with vLLM, completions come from an engine in the trainer's process (also on a
CPU) or from a server that the stage starts; from the trainer's own model otherwise. Weights reach
vLLM as an adapter version, or all of them (`tasks.sync`). One optimizer step uses
`prompts_per_step` groups. What each part adds to TRL is said in `tasks.grpo.trainer`.

The way through: `prepare` reads the questions, `check_before_loading` refuses what can't work,
`train` trains (`tasks.grpo.train`, which also says how a killed run goes on), and `finish` writes
the result. With `grpo.processes` above 1 the last two happen in that many processes
(`tasks.grpo.launch`).

The result is the checkpoint that did best on dev questions (`tasks.training.dev_check`), the last
one where there are none.
"""

from __future__ import annotations

from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from tasks.grpo.checks import check_before_loading
from tasks.grpo.finish import finish
from tasks.grpo.launch import train_in_processes
from tasks.grpo.settings import Sections
from tasks.grpo.train import prepare, train
from tasks.runtime.context import StageContext, StageResult


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
    return finish(ctx, sections, train(ctx, sections, tokenizer, prompts))
