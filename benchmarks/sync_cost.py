"""What a weight sync costs: seconds and bytes of adapter sync and of merged sync, alternating.

Not a test module. Each way has a process with a trainer's model, LoRA on every linear layer, and a
vLLM engine of its own; the two take turns, so that a busy machine is busy for both.

    python -m benchmarks.sync_cost MODEL_FOLDER [ROUNDS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANK = 16


def backend(model_path: str, kind: str, folder: Path) -> Any:
    """Model, adapter that isn't zero, and engine."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tasks.models.checkpoints import ModelLocation
    from tasks.sampling.engines.base import EngineSpec
    from tasks.sync.engine import EngineSettings
    from tasks.sync.generation import AdapterGeneration, MergedGeneration

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    policy = get_peft_model(model, lora)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    spec = EngineSpec(
        location=ModelLocation(model_path, None),
        tokenizer=None,  # type: ignore[arg-type]
        stop_ids=(),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,
    )
    by_adapter = kind == "adapter"
    settings = EngineSettings(spec, 0, RANK if by_adapter else None, folder)
    made = AdapterGeneration if by_adapter else MergedGeneration
    return made(policy, Accelerator(), None, settings=settings, max_model_length=256)


def serve(model_path: str, kind: str) -> None:
    """Sync once per line of input; tell seconds and bytes on a line."""
    with tempfile.TemporaryDirectory() as folder:
        generation = backend(model_path, kind, Path(folder) / "versions")
        print("ready", flush=True)
        for step, _ in enumerate(sys.stdin):
            record = generation.sync_as(step)
            print(json.dumps([record.seconds, record.num_bytes]), flush=True)


def start(model_path: str, kind: str) -> subprocess.Popen[str]:
    """A process that syncs when told to."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sync_cost", "serve", model_path, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        assert line, f"the {kind} process ended"
    return process


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3])
        return
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    processes = {kind: start(sys.argv[1], kind) for kind in ("adapter", "merged")}
    found: dict[str, list[list[float]]] = {kind: [] for kind in processes}
    for turn in range(rounds + 1):
        for kind, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            print("sync", file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            if turn:  # the first warms up
                found[kind].append(answer)
    for kind, process in processes.items():
        process.communicate()
        seconds = [one[0] for one in found[kind]]
        spread = ", ".join(f"{value:.3f}" for value in seconds)
        print(f"{kind}: median {statistics.median(seconds):.3f} s ({spread}), ", end="")
        print(f"{found[kind][0][1] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
