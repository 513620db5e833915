"""What a vLLM server's worker can be asked for beside vLLM's own requests: the weights it uses.

The server loads `Reader` into its worker (`--worker-extension-cls`) and `/collective_rpc` calls it.
"""

from __future__ import annotations

from typing import Any

from safetensors.torch import save_file

from tasks.sync.readback import adapter_slot, effective_weights, vocab_rows


class Reader:
    """Mixed into vLLM's worker."""

    def write_effective_weights(self, path: str) -> None:
        """Write the weights that are sampled with, the loaded adapter included, as safetensors."""
        worker: Any = self
        loaded = sorted(worker.list_loras()) if worker.vllm_config.lora_config else []
        assert len(loaded) <= 1, f"one adapter at a time, not {loaded}"
        slot = adapter_slot(worker, loaded[0]) if loaded else None
        weights = dict(effective_weights(worker.get_model(), slot))
        save_file({name: value.contiguous() for name, value in weights.items()}, path)

    def count_vocab_rows(self) -> int:
        """Tokens that the softmax runs over."""
        worker: Any = self
        return vocab_rows(worker.get_model())
