"""Sampling with transformers, for machines without vLLM and models too small to need it.

Rows are sorted by prompt length and generated in left-padded batches; a row that has ended leaves
its batch, so that the few long completions don't cost as much as if all were long. One global
generator is seeded at the start of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ratchet.store.store import Artifact
from tasks.models.checkpoints import load_model
from tasks.sampling.engines.base import (
    PLAIN,
    EngineSpec,
    OnProgress,
    Sample,
    Shaping,
    as_samples,
    check_lengths,
)

ATTENTION = "sdpa"


def load_sampler(spec: EngineSpec, artifact: Artifact) -> TransformersSampler:
    """A sampler on the model of an artifact, on the GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(artifact, dtype=spec.dtype, attention=ATTENTION)
    return TransformersSampler(spec, model.to(device).eval())


class Chooser:
    """Picks the next token of each row of a batch: the likeliest at temperature 0, else drawn."""

    def __init__(
        self, temperature: float, shaping: Shaping, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.temperature = temperature
        self.penalty = shaping.repetition_penalty
        self.seen = [list(prompt) for prompt in prompts]
        """Token ids of each row so far, kept up to date only where they are penalised."""
        self.warpers = LogitsProcessorList()
        if shaping.min_p > 0:
            self.warpers.append(MinPLogitsWarper(shaping.min_p))
        if shaping.top_k > 0:
            self.warpers.append(TopKLogitsWarper(shaping.top_k))
        if shaping.top_p < 1:
            self.warpers.append(TopPLogitsWarper(shaping.top_p))

    def __call__(self, logits_bv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Token ids for the rows of the batch with numbers `rows`."""
        if self.penalty != 1:
            logits_bv = self._penalised(logits_bv, rows.tolist())
        next_b = self._drawn(logits_bv)
        if self.penalty != 1:
            for row, token in zip(rows.tolist(), next_b.tolist(), strict=True):
                self.seen[row].append(token)
        return next_b

    def _drawn(self, logits_bv: torch.Tensor) -> torch.Tensor:
        if self.temperature == 0:
            return logits_bv.argmax(dim=-1)
        scores_bv = self.warpers(None, logits_bv / self.temperature)
        # Dividing by unit exponentials and taking the largest draws from the distribution; it is
        # several times faster than torch.multinomial on a CPU.
        probs_bv = scores_bv.softmax(dim=-1)
        return probs_bv.div_(torch.empty_like(probs_bv).exponential_()).argmax(dim=-1)

    def _penalised(self, logits_bv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Scores with those of tokens in the prompt or the completion made smaller (Keskar et al.
        2019, as transformers and vLLM do it)."""
        seen_bv = torch.zeros_like(logits_bv, dtype=torch.bool)
        for place, row in enumerate(rows):
            seen_bv[place, self.seen[row]] = True
        smaller_bv = torch.where(logits_bv > 0, logits_bv / self.penalty, logits_bv * self.penalty)
        return torch.where(seen_bv, smaller_bv, logits_bv)


class TransformersSampler:
    """A `Sampler` on a loaded model in evaluation mode."""

    def __init__(self, spec: EngineSpec, model: PreTrainedModel) -> None:
        self.spec = spec
        self.device = model.device
        self.model = model

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        shaping: Shaping = PLAIN,
        on_progress: OnProgress | None = None,
    ) -> list[list[Sample]]:
        """See `Sampler.generate`."""
        check_lengths(prompts, max_tokens, self.spec.max_model_len)
        torch.manual_seed(seed)
        rows = [index for index in range(len(prompts)) for _ in range(n)]
        # Stable, so the order of equally long prompts is theirs and the result reproducible.
        order = sorted(range(len(rows)), key=lambda row: len(prompts[rows[row]]))
        tokens: list[list[int]] = [[] for _ in rows]
        num_done = num_tokens = 0
        for start in range(0, len(order), self.spec.max_num_seqs):
            batch = order[start : start + self.spec.max_num_seqs]
            found = self._batch(
                [prompts[rows[row]] for row in batch], temperature, shaping, max_tokens
            )
            for row, ids in zip(batch, found, strict=True):
                tokens[row] = ids
            num_done += len(batch)
            num_tokens += sum(len(ids) for ids in found)
            if on_progress is not None:
                on_progress(num_done, num_tokens)
        samples = as_samples(self.spec, tokens)
        return [samples[start : start + n] for start in range(0, len(samples), n)]

    def _batch(
        self,
        prompts: list[Sequence[int]],
        temperature: float,
        shaping: Shaping,
        max_tokens: int,
    ) -> list[list[int]]:
        """Sampled token ids of each prompt, the ending token included."""
        width = max(len(prompt) for prompt in prompts)
        pad = self.spec.stop_ids[0] if self.spec.stop_ids else 0
        ids_bt = torch.tensor(
            [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts],
            device=self.device,
        )
        mask_bt = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
            device=self.device,
        )
        stops = torch.tensor(self.spec.stop_ids, device=self.device)
        position_bt = (mask_bt.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        found: list[list[int]] = [[] for _ in prompts]
        alive = torch.arange(len(prompts), device=self.device)
        chooser = Chooser(temperature, shaping, prompts)
        for _ in range(max_tokens):
            out = self.model(
                input_ids=ids_bt,
                attention_mask=mask_bt,
                position_ids=position_bt,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            next_b = chooser(out.logits[:, -1].float(), alive)
            for row, token in zip(alive.tolist(), next_b.tolist(), strict=True):
                found[row].append(token)
            going_b = ~torch.isin(next_b, stops)
            if not going_b.any():
                break
            ids_bt, position_bt = next_b[:, None], position_bt[:, -1:] + 1
            mask_bt = torch.cat([mask_bt, mask_bt.new_ones(len(mask_bt), 1)], dim=1)
            if not going_b.all():
                keep = going_b.nonzero().squeeze(1)
                cache.reorder_cache(keep)  # linear-attention layers can do nothing else
                ids_bt, position_bt, mask_bt = ids_bt[keep], position_bt[keep], mask_bt[keep]
                alive = alive[keep]
        return found

    @torch.inference_mode()
    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """See `Sampler.logprobs`."""
        ids = torch.tensor([[*prompt_ids, *completion_ids]], device=self.device)
        logits_tv = self.model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()
        wanted_t = torch.tensor(completion_ids, device=self.device)
        found: list[float] = (
            logits_tv.log_softmax(dim=-1).gather(1, wanted_t[:, None]).squeeze(1).tolist()
        )
        return found
