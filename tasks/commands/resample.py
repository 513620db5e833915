"""Draw one completion of a presample again and compare it with what is recorded.

    python -m tasks.commands.resample --store STORE --artifact presample/KEY --question ID --sample
    N --log LOG

A completion isn't drawn alone: its randomness and, in the last bits, its probabilities depend on
the whole call of the engine that made it. So that call is made again, a shard of `shard_questions`
questions times `k_block` samples, with the seed that stands in the table. The same text is to be
expected from the same model and engine version on the same kind of device, with as many threads on
a CPU. Nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.run import ModelConfig, PresampleConfig, PromptConfig, SamplerConfig
from ratchet.errors import EXIT_USER_ERROR, UserError
from ratchet.store.lock import hold
from ratchet.store.store import Artifact, Store
from tasks.models.checkpoints import load_tokenizer
from tasks.runtime.context import StageContext
from tasks.runtime.manifests import device_description, package_versions
from tasks.runtime.worker import Emit, redirect_output, set_environment
from tasks.sampling.engines import Sample
from tasks.sampling.shards import Shard, ShardStore, plan_shards, render
from tasks.sampling.workers import Work, open_engine
from tasks.stages.presample import request_of


@dataclass(frozen=True)
class Redrawn:
    """A completion as it is recorded and as it came out again."""

    recorded: dict[str, Any]
    """Its row of table 'completions'."""
    sample: Sample
    shard: Shard
    """The call that was made again."""
    seconds: float
    differences: list[str]
    """What isn't as it was when the sample was recorded: packages, device."""

    @property
    def is_same(self) -> bool:
        """Whether it is the same completion, token for token."""
        return self.sample.token_ids == self.recorded["token_ids"]


def recorded_row(artifact: Artifact, question: str, index: int) -> dict[str, Any]:
    """The row of sample `index` of the question whose id starts with `question`; UserError when
    there is none, or several such questions."""
    import pyarrow.compute as pc

    table = artifact.table("completions")
    found = table.filter(pc.starts_with(table.column("question_id"), question))
    names = found.column("question_id").unique().to_pylist()
    if len(names) != 1:
        several = f"{len(names):,} questions" if names else "no question"
        raise UserError(f"'{question}' is the start of {several} in {artifact.ref}")
    rows = {row["sample_index"]: row for row in found.to_pylist()}
    if index not in rows:
        raise UserError(f"question {names[0]} has samples 0 to {len(rows) - 1}, and no {index}")
    row: dict[str, Any] = rows[index]
    return row


def call_of(artifact: Artifact, work: Work, row: dict[str, Any]) -> tuple[Shard, int]:
    """The shard that a row is from, and the longest prompt of all shards; UserError when the
    prompts aren't what they were."""
    config = artifact.manifest.config
    request = request_of(
        work.ctx.inputs["questions"],
        PromptConfig.model_validate(config["prompt"]),
        PresampleConfig.model_validate(config["presample"]),
    )
    tokenizer = load_tokenizer(work.ctx.inputs["model"])
    prompts = render(tokenizer, request, enable_thinking=work.model_config.enable_thinking)
    shard = next(
        shard
        for shard in plan_shards(request, prompts)
        if row["question_id"] in shard.question_ids
        and shard.first_sample <= row["sample_index"] < shard.first_sample + shard.num_samples
    )
    if ShardStore(work.ctx, work.model_config, work.sampler).call_seed(shard) != row["seed"]:
        raise UserError(
            f"{artifact.ref} was sampled with other prompts than this version of Ratchet writes "
            f"(format '{row['prompt_format']}'): draw it again with the version that made it, "
            f"{artifact.manifest.git_commit}"
        )
    return shard, max(map(len, prompts))


def redraw(store: Store, ref: str, question: str, index: int, emit: Emit) -> Redrawn:
    """Draw sample `index` of a question again; `ref` is `presample/KEY`.

    UserError when that names nothing that can be drawn again.
    """
    artifact = store.get(*ref.split("/"))
    manifest = artifact.manifest
    row = recorded_row(artifact, question, index)
    inputs = {role: store.get(made.stage, made.key) for role, made in manifest.parents.items()}
    ctx = StageContext(
        node=manifest.node,
        key=manifest.key,
        run_id=manifest.run_id,
        seed=manifest.seed,
        store=store,
        inputs=inputs,
        out_dir=artifact.folder,
        work_dir=store.work_folder(manifest.stage, manifest.key),
        emit=emit,
    )
    model_config = ModelConfig.model_validate(manifest.config["model"])
    sampler = SamplerConfig.model_validate(manifest.config["sampler"])
    if sampler.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(f"{artifact.ref} was sampled with vLLM, which isn't installed here")
    shard, longest = call_of(artifact, Work(ctx, model_config, sampler, 0), row)
    work = Work(ctx, model_config, sampler, longest)
    with hold(store.root / ".locks" / "device.lock", ctx.log), open_engine(work) as engine:
        ctx.log(f"drawing {len(shard.prompts):,} questions × {shard.num_samples} samples again")
        started = time.monotonic()
        samples = ShardStore(ctx, model_config, sampler).draw(shard, engine)
        seconds = time.monotonic() - started
    place = shard.question_ids.index(row["question_id"])
    sample = samples[place][index - shard.first_sample]
    return Redrawn(row, sample, shard, seconds, _differences(artifact))


def _differences(artifact: Artifact) -> list[str]:
    """What the artifact was made with and this process doesn't have."""
    then, now = artifact.manifest, package_versions()
    found = [
        f"{name} {version}, now {now.get(name, 'missing')}"
        for name, version in then.packages.items()
        if now.get(name) != version
    ]
    if then.device != device_description():
        found.append(f"device {then.device}, now {device_description()}")
    return found


def words(found: Redrawn) -> str:
    """What came out, for people."""
    row, shard = found.recorded, found.shard
    lines = [
        f"question {row['question_id']}, sample {row['sample_index']}: model {row['model_key']}, "
        f"temperature {row['temperature']:g}, seed {row['seed']}",
        f"its call of {len(shard.prompts):,} questions × {shard.num_samples} samples, drawn again "
        f"in {found.seconds:.1f} s, gave",
    ]
    if found.is_same:
        return "\n".join([*lines, "the same text, token for token:", "", row["text"]])
    old, new = row["token_ids"], found.sample.token_ids
    pairs = enumerate(zip(old, new, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
    reasons = "; ".join(found.differences) or (
        "packages and device are the same: another number of threads, or an engine that doesn't "
        "repeat itself"
    )
    lines += [f"another text, from token {first + 1} on. Made with: {reasons}", ""]
    return "\n".join([*lines, "recorded:", row["text"], "", "now:", found.sample.text])


def main() -> int:
    """Draw as the command line says and emit one event, 'done' or 'error'; the exit code, 1 for
    another text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--question", required=True)
    parser.add_argument("--sample", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True, help="where engines print to")
    given = parser.parse_args()
    set_environment()
    emit = redirect_output(given.log)
    try:
        found = redraw(Store(given.store), given.artifact, given.question, given.sample, emit)
    except UserError as error:
        emit({"event": "error", "message": str(error)})
        return EXIT_USER_ERROR
    emit({"event": "done", "message": words(found)})
    return 0 if found.is_same else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no engine's exit handler shall hang here
