"""Drift per step of GRPO runs that differ in how weights reach the sampler, and their plot.

Not a test module. A real GRPO stage each: the seedling, symbolic questions, vLLM in the trainer's
process, LoRA, a learning rate that moves the policy; the guard only warns. `stock` runs get what
TRL's server mode would have sent (`stock_packing`), with that share of the layers left stale.

    python -m benchmarks.drift_runs run FOLDER adapter [merged stock-100 stock-62 stock-13 …]
    python -m benchmarks.drift_runs plot FOLDER docs/drift.png
    python -m benchmarks.drift_runs table FOLDER

`merged-server` needs a second GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratchet.config.run import (
    GrpoConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    PromptConfig,
    PromptFormat,
    RewardsConfig,
    SamplerConfig,
    WandbConfig,
)
from ratchet.questions.symbolic import draw
from ratchet.store.schemas import read_table
from ratchet.store.store import Artifact
from tests.support.made_up import artifact
from tests.support.tiny_grpo import SEEDLING, context

STEPS = 40
KEY_BIAS = 5.0
"""Standard deviation of the Qwen2-architecture model's key biases."""
SHARES = {"stock-100": 1.0, "stock-62": 0.62, "stock-13": 0.13}
KINDS = {
    "adapter": "adapter sync (ours)",
    "merged": "merged sync (ours)",
    "stock-13": "stock packing, 13% of layers stale",
    "stock-62": "stock packing, 62% stale",
    "stock-100": "stock packing, 100% stale",
    "adapter-bf16": "adapter sync, bfloat16",
    "adapter-qwen2": "adapter sync, Qwen2 with large key biases",
    "adapter-server": "adapter sync to a server",
    "merged-server": "merged sync to a server",
}


def qwen2_with_key_biases(folder: Path) -> Path:
    """A small random Qwen2 model with normal key biases and the seedling's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(SEEDLING)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=KEY_BIAS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def questions() -> list[dict[str, Any]]:
    """Rows of a questions table: easy symbolic questions."""
    return [
        {
            "question_id": f"q{i}",
            "source": "symbolic",
            "split": "train",
            "role": "train",
            "question": one.question,
            "gold": one.gold,
            "reference_solution": one.reference_solution,
            "difficulty": float(one.num_steps),
            "band": str(one.num_steps),
            "num_prompt_tokens": 0,
        }
        for i, one in enumerate(draw(96, seed=21, max_steps=2))
    ]


def inputs(folder: Path) -> dict[str, Artifact]:
    """What the stage reads beside the model: every question is trained on."""
    rows = questions()
    chosen = [
        {
            "question_id": row["question_id"],
            "num_samples": 8,
            "pass_rate_lenient": 0.5,
            "pass_rate_strict": 0.5,
            "bucket": "live",
            "role": "rl",
            "why": "drift run",
        }
        for row in rows
    ]
    return {
        "questions": artifact(folder / "q", "questions", {"questions": rows}),
        "selection": artifact(folder / "s", "filter", {"selection": chosen}),
    }


def backend(kind: str) -> AbstractContextManager[None]:
    """What replaces the merged backend in a stock run."""
    if kind not in SHARES:
        return nullcontext()
    from transformers import AutoConfig

    from tests.support.stock_packing import packing_for, stock_packing

    packing = packing_for(AutoConfig.from_pretrained(SEEDLING), SHARES[kind])
    print(f"{kind}: {packing}", flush=True)
    return stock_packing(packing)


def run(folder: Path, kind: str, steps: int = STEPS) -> list[dict[str, Any]]:
    """Run one kind in a fresh sub-folder; the rows of its metrics table."""
    from tasks.stages.grpo import run as run_stage

    place = folder / kind
    place.mkdir(parents=True)
    qwen2 = kind == "adapter-qwen2"
    model = qwen2_with_key_biases(folder / "qwen2-model") if qwen2 else SEEDLING
    ctx = context(place, model)
    ctx = replace(ctx, inputs={**ctx.inputs, **inputs(place)}, emit=lambda event: print(event))
    rewards = {"tests.support.tiny_grpo:letters": 1.0} if qwen2 else {}
    with backend(kind):
        run_stage(
            ctx,
            model=ModelConfig(dtype="bfloat16" if kind.endswith("bf16") else "float32"),
            prompt=PromptConfig(format=PromptFormat.TAGS_SHORT),
            sampler=SamplerConfig(engine="vllm", max_completion_tokens=48),
            rewards=RewardsConfig(weights=rewards),
            grpo=GrpoConfig(
                steps=steps,
                prompts_per_step=4,
                group_size=8,
                micro_batch_size=32,
                learning_rate=2e-3,
                lora=LoraConfig(r=8, alpha=16),
                sync="adapter" if kind.startswith("adapter") else "merged",
                vllm_mode="server" if kind.endswith("server") else "colocate",
                vllm_server_device="1" if kind == "merged-server" else None,
            ),
            guard=GuardConfig(halt=False),
            wandb=WandbConfig(),
        )
    rows: list[dict[str, Any]] = read_table(ctx.out_dir / "metrics.parquet", "metrics").to_pylist()
    (folder / f"{kind}.json").write_text(json.dumps(rows))
    return rows


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics of the runs found in `folder`, by kind."""
    return {
        kind: json.loads((folder / f"{kind}.json").read_text())
        for kind in KINDS
        if (folder / f"{kind}.json").exists()
    }


def table(folder: Path) -> None:
    """Print a row per run: drift at the start, at the end and at most, dropped share, reward."""
    print("| run | drift, first 5 steps | last 5 | most | dropped | reward, first 5 | last 5 |")
    print("|---|---|---|---|---|---|---|")
    for kind, rows in read(folder).items():

        def part(name: str, chosen: list[dict[str, Any]]) -> float:
            return sum(row[name] for row in chosen) / len(chosen)

        first, last = rows[:5], rows[-5:]
        print(
            f"| {KINDS[kind]} | {part('drift_mean', first):.1e} | {part('drift_mean', last):.1e} "
            f"| {max(row['drift_max'] for row in rows):.1e} | {part('dropped_share', rows):.1%} "
            f"| {part('reward', first):.2f} | {part('reward', last):.2f} |"
        )


def plot(folder: Path, target: Path) -> None:
    """Draw drift, dropped share and reward of the runs found in `folder`."""
    import matplotlib.pyplot as plt

    found = read(folder)
    panels = {
        "drift_mean": "Drift, nats per token",
        "dropped_share": "Completions dropped by the importance mask",
        "reward": "Mean reward (running mean of 5 steps)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for (name, title), axis in zip(panels.items(), axes, strict=True):
        for index, (kind, rows) in enumerate(found.items()):
            if name == "reward" and kind == "adapter-qwen2":
                continue  # another reward
            values = [row[name] for row in rows]
            if name == "reward":
                values = [
                    sum(values[max(0, i - 4) : i + 1]) / min(5, i + 1) for i in range(len(values))
                ]
            axis.plot(
                [row["step"] for row in rows],
                values,
                label=KINDS[kind],
                color=f"C{index}",
                linestyle="--" if kind.startswith("stock") else "-",
                linewidth=1.6,
            )
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("optimizer step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[1].set_ylim(-0.01, None)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize=9,
        frameon=False,
    )
    figure.savefig(target, dpi=110)


def main() -> None:
    """See the module's docstring."""
    what, folder, *rest = sys.argv[1:]
    if what == "plot":
        plot(Path(folder), Path(rest[0]))
    elif what == "table":
        table(Path(folder))
    elif what == "one":
        run(Path(folder), rest[0])
    else:
        for kind in rest:  # a process each: an engine leaves its variables behind
            subprocess.run(
                [sys.executable, "-m", "benchmarks.drift_runs", "one", folder, kind], check=True
            )


if __name__ == "__main__":
    main()
