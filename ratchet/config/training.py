"""The sections of the configuration that train: warm-starts, RL and the guard over it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.base import Section


class LoraConfig(Section):
    """Low-rank adapters on every linear layer, without dropout."""

    enabled: bool = True
    """Train adapters; off = full fine-tuning."""
    r: int = Field(default=16, ge=1)
    """Rank."""
    alpha: int = Field(default=32, ge=1)
    """Scale; the update is multiplied by alpha / r."""


class WarmstartConfig(Section):
    """What happens before RL."""

    method: Literal["none", "sft", "opd"] = "sft"
    """Supervised fine-tuning, on-policy distillation, or nothing."""
    data: Literal["dropped", "source"] = "dropped"
    """'dropped' = questions the filter left out of RL; 'source' = `questions.warmup`."""


class CheckedConfig(Section):
    """What both warm-starts have: checkpoints that answer dev questions."""

    checkpoints: int = Field(default=10, ge=1)
    """Checkpoints on the way, evenly spread; a killed run loses at most the steps after one."""
    dev_questions: int = Field(default=100, ge=0)
    """Dev questions answered greedily at every checkpoint; the best checkpoint is the result.
    0 = the last is."""
    patience: int = Field(default=4, ge=1)
    """Training ends after so many checkpoints in a row that are worse than the best."""


class SftConfig(CheckedConfig):
    """Supervised fine-tuning on reference solutions in the run's format, on right samples, or on
    both."""

    epochs: float = Field(default=2.0, gt=0)
    """Passes over the warm-up set."""
    reference_weight: float = Field(default=1.0, ge=0)
    """Passes over the reference solutions in an epoch; 0 = none of them."""
    samples: Literal["none", "best", "shortest", "all"] = "none"
    """Which of presampling's strictly right samples of each warm-up question are learnt from too:
    the one with the highest reward, the shortest, or all."""
    samples_weight: float = Field(default=1.0, gt=0)
    """Passes over the samples in an epoch."""
    max_examples: int | None = Field(default=None, ge=1)
    """Warm-up questions used at most."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    batch_size: int = Field(default=16, ge=1)
    """Examples per optimizer step."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Examples per forward pass."""
    max_length: int = Field(default=1024, ge=16)
    """Prompt and answer in tokens; longer examples are dropped and counted, never cut."""
    attention: Literal["eager", "sdpa"] = "eager"
    """Attention kernel; sdpa in bf16 is known to give NaN gradients on some batches."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping."""
    lora: LoraConfig = LoraConfig(enabled=False)
    """Adapters instead of full fine-tuning."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> SftConfig:
        if self.samples == "none" and not self.reference_weight:
            raise ValueError("reference_weight = 0 leaves nothing to learn with samples = 'none'")
        return self


class OpdConfig(CheckedConfig):
    """On-policy distillation: the student samples, a teacher scores every token."""

    teacher: str | None = None
    """Teacher model: hub id or local directory with the student's tokenizer."""
    teacher_revision: str | None = None
    """Hub revision of the teacher."""
    steps: int = Field(default=50, ge=1)
    """Optimizer steps."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    batch_size: int = Field(default=16, ge=1)
    """Completions per optimizer step."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Completions per forward pass."""
    beta: float = Field(default=1.0, ge=0, le=1)
    """1 = reverse KL, 0 = forward KL."""
    temperature: float = Field(default=1.0, gt=0)
    """Student's sampling temperature."""
    vllm_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the device's memory for vLLM, beside student and teacher."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping."""
    lora: LoraConfig = LoraConfig(enabled=False)
    """Adapters instead of full fine-tuning."""


Algorithm = Literal["grpo", "dapo", "gspo"]
ALGORITHMS: dict[Algorithm, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0, "refill_rounds": 4},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
}
"""What an algorithm sets where nobody else does: DAPO (https://arxiv.org/abs/2503.14476) clips
higher, has no KL term and refills dead groups; GSPO (https://arxiv.org/abs/2507.18071) weighs and
clips whole completions, in a range of their size."""


Device = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^[^,\s]+$"),
]
"""One device as CUDA_VISIBLE_DEVICES takes it: an index, which may be written as a number, or a
UUID."""


class GrpoConfig(Section):
    """Reinforcement learning on verifiable rewards."""

    algorithm: Algorithm = "grpo"
    """Sets loss_type, importance_sampling_level, epsilon, beta and refill_rounds to go with it,
    where they are not set themselves."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Generated tokens after which training ends even if steps are left; no limit when left out."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Questions per optimizer step; each gives one group."""
    group_size: int = Field(default=8, ge=2)
    """Completions per question."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Completions per forward and backward pass."""
    processes: int = Field(default=1, ge=1)
    """Training processes, each with a full copy of policy and sampler, on GPUs one device each;
    they share every step's questions."""
    learning_rate: float = Field(default=3e-5, gt=0)
    """Constant learning rate: 3e-5 suits LoRA, 5e-6 full fine-tuning."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the starting policy."""
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo"] = "dapo"
    """How token losses are averaged."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """'sequence' is GSPO."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by."""
    epsilon: float = Field(default=0.2, gt=0)
    """Lower clip range."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip range; the lower one's when left out."""
    refill_rounds: int = Field(default=0, ge=0)
    """Rounds in which groups without reward variance are replaced by other questions' before the
    gradient step (dynamic sampling); 0 = never."""
    num_iterations: int = Field(default=1, ge=1)
    """Optimizer passes over each batch of completions."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; top_p, top_k and min_p stay off, they would bias the ratio."""
    lora: LoraConfig = LoraConfig()
    """Adapters; their weights reach the sampler without a merge."""
    sync: Literal["auto", "adapter", "merged"] = "auto"
    """How new weights reach vLLM: 'adapter' for LoRA, 'merged' for full fine-tuning."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """Where vLLM runs: in the trainer's process, or in a server that the stage starts and stops."""
    vllm_server_device: Device | None = None
    """GPU of the server, as CUDA_VISIBLE_DEVICES takes it; the trainer's when left out."""
    vllm_memory_utilization: float = Field(default=0.35, gt=0, le=1)
    """Share of its device's memory for the sampler, which may be the trainer's."""
    save_every: int = Field(default=20, ge=1)
    """Steps between checkpoints; a killed run loses at most this many steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept while training, beside the best."""
    dev_questions: int = Field(default=100, ge=0)
    """Dev questions answered greedily at every checkpoint; the best checkpoint is the result.
    0 = the last is."""

    @model_validator(mode="after")
    def _can_be_shared(self) -> GrpoConfig:
        if self.prompts_per_step % self.processes:
            raise ValueError(
                f"processes={self.processes} must divide prompts_per_step={self.prompts_per_step}: "
                "each trains on whole groups"
            )
        if self.refill_rounds and self.processes > 1:
            raise ValueError(
                f"refill_rounds={self.refill_rounds} needs processes=1: which groups are replaced "
                "is decided by one process; set refill_rounds=0 or processes=1"
            )
        return self


class AuditConfig(Section):
    """Prove before training that sampler and trainer are one policy."""

    preflight: bool = True
    """Audit the weight sync before GRPO and stop the run if it fails; where vLLM samples."""
    syncs: int = Field(default=3, ge=1)
    """Random versions that are synced and examined, one after the other."""
    sync: Literal["run", "adapter", "merged"] = "run"
    """How weights are synced in the audit; 'run' = as GRPO will."""
    vllm_mode: Literal["run", "colocate", "server"] = "run"
    """Where vLLM runs in the audit; 'run' = where GRPO will have it."""


class GuardConfig(Section):
    """Watch that sampler and trainer stay one policy; none of this changes a result, so a run that
    was halted goes on from its checkpoint under other levels."""

    halt: bool = True
    """Halt above the halt levels; off = only warn."""
    warn_drift: float = Field(default=5.0, gt=1)
    """Warn when drift is this many times its level at step 1 (or what rounding explains)."""
    halt_drift: float = Field(default=20.0, gt=1)
    """Halt when drift is this many times that level."""
    warn_dropped: float = Field(default=0.1, ge=0, le=1)
    """Warn when more than this share of the completions is dropped by the importance mask."""
    halt_dropped: float = Field(default=0.5, ge=0, le=1)
    """Halt when more than this share is dropped."""
    warn_effective: float = Field(default=0.5, ge=0, le=1)
    """Warn when the effective sample size falls below this share of the batch."""
    halt_effective: float = Field(default=0.1, ge=0, le=1)
    """Halt when it falls below this share."""
    warn_ratio: float = Field(default=0.02, gt=0)
    """Warn when the mean ratio is this far from 1 (or the entropy check this far from 0) beyond
    chance."""
    halt_ratio: float = Field(default=0.2, gt=0)
    """Halt when it is this far."""
    base_every: int = Field(default=10, ge=0)
    """Steps between checks that a LoRA run's frozen weights are untouched; 0 = never."""

    @model_validator(mode="after")
    def _ordered(self) -> GuardConfig:
        pairs = (
            ("drift", self.warn_drift, self.halt_drift),
            ("dropped", self.warn_dropped, self.halt_dropped),
            ("effective", self.halt_effective, self.warn_effective),
            ("ratio", self.warn_ratio, self.halt_ratio),
        )
        for name, lower, upper in pairs:
            if lower > upper:
                raise ValueError(f"warn_{name} must be reached before halt_{name}")
        return self
