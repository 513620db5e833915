"""What presampling costs over a bare `LLM.generate`: the same engine, prompts and sampling
parameters, alternating in one process.

Not a test module. "bare" is one call for all prompts with n = k, and its answers are dropped;
"ours" is the whole stage `presample` on an empty store: prompts rendered, shards planned, drawn,
decoded and stored. Opening the engine is in neither. The two draw other completions, so
seconds per token are compared; the first pair warms up and isn't counted. On a CPU the engine runs
in this process, so that its processor time says the same on a machine that isn't quiet.

    python -m benchmarks.presample_cost --questions 256 --k 8 --block 8 --shard-questions 256
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.config.run import (
    ModelConfig,
    PresampleConfig,
    PromptConfig,
    PromptFormat,
    SamplerConfig,
    WorkersConfig,
)
from ratchet.models.check import SEEDLING, packaged_model_dir
from ratchet.questions.symbolic import draw
from ratchet.store.store import Store
from tasks.models.checkpoints import load_tokenizer
from tasks.runtime.context import StageContext
from tasks.sampling import workers as shard_makers
from tasks.sampling.shards import render
from tasks.sampling.workers import Work, open_engine
from tasks.stages import presample
from tests.support.made_up import artifact, context, question

MODEL = ModelConfig(path=SEEDLING)
PROMPT = PromptConfig(format=PromptFormat.TAGS_SHORT)


def inputs(folder: Path, count: int) -> dict[str, Any]:
    """The seedling and questions drawn from its templates."""
    rows = [
        question(f"q{index:05}", question=item.question, gold=item.gold)
        for index, item in enumerate(draw(count, 7, max_steps=4))
    ]
    facts = {"path": str(packaged_model_dir(SEEDLING)), "revision": None, "context": 256}
    model = artifact(folder / "model", "model", {})
    (model.folder / "model.json").write_text(json.dumps(facts))
    return {
        "model": model,
        "questions": artifact(folder / "questions", "questions", {"questions": rows}),
    }


def bare(engine: Any, prompts: list[tuple[int, ...]], k: int, sampler: SamplerConfig) -> int:
    """One call of `LLM.generate`; the tokens it drew."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=k,
        temperature=1.0,
        top_k=0,
        max_tokens=sampler.max_completion_tokens,
        detokenize=False,
        stop_token_ids=list(engine.spec.stop_ids),
    )
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = engine.llm.generate(asked, params, use_tqdm=False)
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


@dataclass(frozen=True)
class Cost:
    """What one turn of one way took."""

    seconds: float
    processor_seconds: float
    tokens: int

    def over(self, other: Cost) -> tuple[float, float]:
        """Overhead per token, as a share: of time, of processor time."""
        share = other.tokens / self.tokens
        return (
            self.seconds / other.seconds * share - 1,
            self.processor_seconds / other.processor_seconds * share - 1,
        )

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s, {self.processor_seconds:.2f} s of processor, "
            f"{self.tokens:,} tokens"
        )


def timed(way: Callable[[], int], engine: Any) -> Cost:
    """What a way costs with an empty prefix cache."""
    assert engine.llm.reset_prefix_cache()
    started, worked = time.perf_counter(), time.process_time()
    tokens = way()
    return Cost(time.perf_counter() - started, time.process_time() - worked, tokens)


def compare(folder: Path, given: argparse.Namespace) -> list[tuple[float, float]]:
    """The overhead of each pair but the first."""
    sampler = SamplerConfig(
        engine="vllm", max_completion_tokens=64, max_num_seqs=given.max_num_seqs
    )
    settings = PresampleConfig(
        k=given.k, k_block=given.block, shard_questions=given.shard_questions
    )
    sections = {"model": MODEL, "prompt": PROMPT, "sampler": sampler, "presample": settings}
    asked = inputs(folder, given.questions)
    request = presample.request_of(asked["questions"], PROMPT, settings)
    prompts = render(load_tokenizer(asked["model"]), request, enable_thinking=False)
    overheads = []
    (folder / "engine").mkdir()
    work = Work(context(folder / "engine", asked), MODEL, sampler, max(map(len, prompts)))
    with open_engine(work) as engine:
        shard_makers.open_engine = lambda work: nullcontext(engine)
        for turn in range(given.pairs + 1):
            place = folder / f"turn-{turn}"
            place.mkdir()
            ctx = replace(context(place, asked), store=Store(place / "store"))

            def ours(ctx: StageContext = ctx) -> int:
                done = presample.run(ctx, workers=WorkersConfig(), **sections)
                return done.sampled_tokens

            ways = {"bare": lambda: bare(engine, prompts, given.k, sampler), "ours": ours}
            order = list(ways) if turn % 2 else list(reversed(ways))
            cost = {name: timed(ways[name], engine) for name in order}
            overhead = cost["ours"].over(cost["bare"])
            told = "; ".join(f"{name} {cost[name]}" for name in ways)
            name = f"pair {turn}" if turn else "warm-up"
            print(f"{name}: {told}; {overhead[0]:+.1%}, {overhead[1]:+.1%}", flush=True)
            overheads.append(overhead)
    return overheads[1:]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--shard-questions", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), parser.parse_args())
    for at, what in enumerate(("time", "processor time")):
        median = statistics.median(overhead[at] for overhead in found)
        print(f"median overhead per token, {what}: {median:+.1%}")


if __name__ == "__main__":
    main()
