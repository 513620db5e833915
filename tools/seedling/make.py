"""Train the seedling: a tiny model, from scratch, for a pipeline that must run anywhere.

    python -m tools.seedling.make --out data/seedling

Qwen3 architecture with tied embeddings, its own byte-level BPE in which digits are single tokens
and the four answer tags are tokens that survive decoding. Trained on `tools.seedling.corpus`;
Muon for the matrices (AdamW alone learns far less in the same time), AdamW for embeddings and
norms; examples of about equal length share a batch. The same seed gives the same corpus and
batches; the weights also depend on the torch build and the number of threads.

`--careless 0 --tokenizer data/seedling` trains on careful solutions only, with the seedling's own
tokenizer: a stronger model that can teach it by on-policy distillation. Not covered: resuming.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.seedling.corpus import Example, corpus

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
VOCABULARY = 640
CONTEXT = 256
PROMPT_WEIGHT = 0.1
"""Loss weight of the user's tokens; answer tokens weigh 1."""


@dataclass(frozen=True)
class Recipe:
    """What decides the result; sizes in examples and tokens."""

    seed: int = 0
    careless: float = 1.0
    steps: int = 1300
    batch_size: int = 32
    learning_rate: float = 3e-3
    hidden: int = 192
    layers: int = 3
    feed_forward: int = 512


def main() -> None:
    """Train and save, as the command line says."""
    parser = argparse.ArgumentParser(description="Train the seedling from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    defaults = Recipe()
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--tokenizer", type=Path, help="model folder whose tokenizer to take")
    options = vars(parser.parse_args())
    out, tokenizer = options.pop("out"), options.pop("tokenizer")
    train_seedling(out, Recipe(**options), tokenizer)


def train_seedling(out: Path, recipe: Recipe, tokenizer_folder: Path | None = None) -> list[float]:
    """Train a seedling by `recipe` and save model and tokenizer to `out`; the loss of each step.

    The tokenizer is learnt from the corpus, or taken from `tokenizer_folder`."""
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(recipe.seed)
    examples = corpus(recipe.steps * recipe.batch_size, recipe.seed, recipe.careless)
    if tokenizer_folder is None:
        tokenizer = build_tokenizer(examples)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = build_model(tokenizer, recipe)
    start = time.perf_counter()
    cpu_start = time.process_time()
    losses = train(model, tokenizer, examples, recipe)
    print(
        f"{model.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s, "
        f"{time.process_time() - cpu_start:.0f} s of processor time"
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "recipe.json").write_text(json.dumps(vars(recipe), indent=2) + "\n")
    return losses


def build_tokenizer(examples: list[Example]) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from the corpus, with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, END, *ROLES]
    text = [f"{e.user}\n{e.assistant}" for e in examples[:8000]]
    for tag in TAGS:
        text = [t.replace(tag, "") for t in text]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """An untrained model of the recipe's size."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=recipe.feed_forward,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    recipe: Recipe,
) -> list[float]:
    """One pass over the examples; the learning rate falls to zero over the last half. The loss of
    each step."""
    import torch

    batches = make_batches(encode(tokenizer, examples), recipe)
    optimizers = make_optimizers(model, recipe.learning_rate)
    model.train()
    losses: list[float] = []
    for step, batch in enumerate(batches):
        scale = min(1.0, 2 * (1 - step / len(batches)), (step + 1) / 20)
        loss = weighted_loss(model, *collate(batch, tokenizer.pad_token_id))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            mean = sum(losses[-100:]) / 100
            print(f"step {step + 1}/{len(batches)} loss {mean:.3f}", flush=True)
    model.eval()
    return losses


Encoded = tuple[list[int], int]
"""Token ids and the number of leading ones that are the prompt."""


def encode(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> list[Encoded]:
    """The token ids of each example."""
    prompts = tokenizer([f"{ROLES[1]}{e.user}{ROLES[2]}" for e in examples])["input_ids"]
    answers = tokenizer([f"{e.assistant}{END}" for e in examples])["input_ids"]
    return [(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]


def make_batches(encoded: list[Encoded], recipe: Recipe) -> list[list[Encoded]]:
    """Batches of about equal lengths in random order."""
    rng = random.Random(recipe.seed)
    size, batches = recipe.batch_size, []
    for start in range(0, len(encoded), size * 16):
        pool = sorted(encoded[start : start + size * 16], key=lambda e: len(e[0]))
        batches += [pool[i : i + size] for i in range(0, len(pool), size)]
    rng.shuffle(batches)
    return batches


def collate(batch: list[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and loss weights, both (sequences, longest), padded on the right.

    The padding needs no mask: attention is causal and padding has weight 0.
    """
    import torch

    longest = max(len(tokens) for tokens, _ in batch)
    ids = torch.full((len(batch), longest), pad)
    weights = torch.zeros(len(batch), longest)
    for row, (tokens, num_prompt) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, :num_prompt] = PROMPT_WEIGHT
        weights[row, num_prompt : len(tokens)] = 1.0
    return ids, weights


def weighted_loss(model: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy under `weights`."""
    import torch

    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


def make_optimizers(model: Any, learning_rate: float) -> list[Any]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


if __name__ == "__main__":
    main()
