"""Stage 'audit': is the sampler the trainer's policy? Before training, in seconds.

Makes the very trainer that the GRPO stage would make, with its generation backend and engine, and
runs `tasks.audit.probe` over the pair with random weights. Writes table 'audit', a row per probe,
check and layer group, and says in words what is wrong. A failed audit is an artifact like any
other; whoever asked for it is stopped by the summary's `refused`.

The prompts are a text of our own, so nothing but the model is needed. Launch: `ratchet audit-sync`.
"""

from __future__ import annotations

import time
from typing import Any

from ratchet.config.run import (
    AuditConfig,
    GrpoConfig,
    GuardConfig,
    ModelConfig,
    PromptConfig,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF
from ratchet.rollouts.training_log import TrainingLog
from tasks.audit.effective import READ
from tasks.audit.page import markdown
from tasks.audit.probe import Audit, Settings, run_audit
from tasks.grpo.build import build_trainer
from tasks.grpo.data import Prompts
from tasks.grpo.settings import Sections, resolved_sync
from tasks.grpo.trainer import RolloutTrainer
from tasks.models.checkpoints import load_tokenizer, model_context
from tasks.runtime.context import StageContext, StageResult

TEXT = (
    "Mina picks 14 apples on Monday and 9 on Tuesday. She gives 6 of them to her brother and packs "
    "the rest in bags of three. Each bag sells for 2 coins, and on Friday all of them are sold. "
)
QUESTIONS = ("How many bags?", "How many coins does she get?", "And if 8 go bad?", "What is left?")
PREFIX_TOKENS = 144
"""Length of the shared beginning: more than a cache block, which has 128 tokens on a CPU."""
MIN_PREFIX_TOKENS = 16
NUM_SAMPLES = 4
MAX_TOKENS = 32


def run(
    ctx: StageContext,
    *,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    grpo: GrpoConfig,
    audit: AuditConfig,
) -> StageResult:
    """Audit the pair. UserError where no sampler of its own is there to be audited."""
    if sampler.engine != "vllm":
        raise UserError(
            "sampler.engine = 'transformers': the trainer's own weights do the sampling, so there "
            "is no sync to audit; set sampler.engine = 'vllm'"
        )
    start = time.monotonic()
    trainer, settings = open_pair(ctx, model, prompt, sampler, grpo, audit)
    made = time.monotonic()
    try:
        found = run_audit(trainer, settings, lambda sync: ctx.progress(sync, audit.syncs, "syncs"))
        facts = trainer.vllm_generation.facts()
    finally:
        trainer.vllm_generation.close()
    rows = [row.as_dict() for row in found.rows]
    ctx.write_table("audit", rows)
    summary = _summary(found, settings) | {
        "mode": facts.mode,
        "setup_seconds": made - start,
        "audit_seconds": time.monotonic() - made,
    }
    ctx.log(f"{'passed' if found.ok else 'FAILED'}: {found.diagnosis.words}")
    return StageResult(
        summary=summary,
        markdown=markdown(summary, rows),
        sampled_tokens=found.num_tokens,
        device_seconds=time.monotonic() - start,
    )


def open_pair(
    ctx: StageContext,
    model: ModelConfig,
    prompt: PromptConfig,
    sampler: SamplerConfig,
    grpo: GrpoConfig,
    audit: AuditConfig,
) -> tuple[RolloutTrainer, Settings]:
    """The trainer that GRPO would make, sampler included, and what to audit it with."""
    tokenizer = load_tokenizer(ctx.inputs["model"])
    limit = min(filter(None, (model_context(ctx.inputs["model"]), model.max_model_len)))
    prompts = build_audit_prompts(tokenizer, limit - sampler.max_completion_tokens, prompt)
    guard = GuardConfig(base_every=0)
    sections = Sections(model, prompt, sampler, RewardsConfig(), grpo, guard, WandbConfig())
    training_log = TrainingLog(ctx.work_dir / "steps")
    trainer = build_trainer(ctx, sections, tokenizer, prompts, training_log)
    settings = Settings(
        dtype=model.dtype,
        by_adapter=resolved_sync(grpo, model.dtype) == "adapter",
        prompts=list(prompts.ids.values()),
        num_samples=NUM_SAMPLES,
        max_tokens=min(MAX_TOKENS, sampler.max_completion_tokens),
        temperature=grpo.temperature,
        batch_size=grpo.micro_batch_size,
        num_syncs=audit.syncs,
        seed=ctx.seed,
    )
    return trainer, settings


def build_audit_prompts(tokenizer: Any, room: int, prompt: PromptConfig) -> Prompts:
    """Prompts of at most `room` tokens that share a beginning and end differently."""
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in QUESTIONS]
    num_shared = min(PREFIX_TOKENS, room - max(map(len, ends)))
    if num_shared < MIN_PREFIX_TOKENS:
        raise UserError(
            "sampler.max_completion_tokens leaves too little of the model's context for a prompt: "
            "lower it"
        )
    once: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    shared = (once * (num_shared // len(once) + 1))[:num_shared]
    names = [f"audit {i}" for i in range(len(ends))]
    style = STYLE_OF[prompt.format].value
    rows = [
        {
            "prompt": name,
            "question_id": name,
            "question": TEXT,
            "gold": "0",
            "reference_solution": None,
            "style": style,
        }
        for name in names
    ]
    return Prompts(rows, {name: shared + end for name, end in zip(names, ends, strict=True)})


def _summary(found: Audit, settings: Settings) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "passed": found.ok,
        "sync": "adapter" if settings.by_adapter else "merged",
        "cause": found.diagnosis.cause.value,
        "probe": None if found.diagnosis.probe is None else found.diagnosis.probe.value,
        "found_at_sync": None if found.ok else found.sync,
        "num_syncs": settings.num_syncs,
        "num_checks": len(found.rows),
        "num_failed_checks": sum(not row.ok for row in found.rows),
        "drift_first": found.drift[0] if found.drift else None,
        "drift_last": found.drift[-1] if found.drift else None,
        "read_back": next((row.worst for row in found.rows if row.check == READ), None),
        "diagnosis": found.diagnosis.words,
    }
    if not found.ok:
        said = f"{found.diagnosis.cause.value}: {found.diagnosis.words}"
        summary["refused"] = f"{said} (`--set audit.preflight=false` trains all the same)"
    return summary
