"""The arguments that TRL's trainers have in common, from a stage's configuration section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ratchet.config.run import GrpoConfig, OpdConfig, SftConfig
from tasks.runtime.context import StageContext


def training_folder(ctx: StageContext) -> Path:
    """Where the trainer keeps its checkpoints."""
    return ctx.work_dir / "training"


def common_arguments(
    section: SftConfig | OpdConfig | GrpoConfig,
    *,
    folder: Path,
    seed: int,
    num_steps: int,
    accumulation_steps: int,
    save_steps: int,
    autocast: bool,
    report_to: list[str],
) -> dict[str, Any]:
    """Keyword arguments of every trainer's configuration; `autocast` to bfloat16."""
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(folder),
        "max_steps": num_steps,
        "per_device_train_batch_size": section.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "learning_rate": section.learning_rate,
        "max_grad_norm": section.max_grad_norm,
        "bf16": autocast,
        "use_cpu": not on_gpu,
        # Costs a fifth of the time for much of the memory: not wanted where memory is plenty.
        "gradient_checkpointing": on_gpu,
        "seed": seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": save_steps,
        "disable_tqdm": True,
        "report_to": report_to,
    }
