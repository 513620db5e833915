"""Everything a run can set, each thing said once.

`RunConfig` is a tree of frozen models; the line under a field is its description, shown by the
command line and by the form in the Prefect UI. Presets (`ratchet/presets/*.toml`) fill the tree;
`ratchet.config.load` reads them, applies `--set` and words the errors. A stage gets exactly the
sections that `ratchet.pipeline.stages` declares for it, so a setting outside them can't change its
result.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from ratchet.config.base import Section
from ratchet.config.evaluate import Control, EvaluateConfig, VariantConfig
from ratchet.config.training import (
    AuditConfig,
    GrpoConfig,
    GuardConfig,
    LoraConfig,
    OpdConfig,
    SftConfig,
    WarmstartConfig,
)
from ratchet.config.workers import WorkersConfig

__all__ = [
    "AuditConfig",
    "BenchmarkConfig",
    "Control",
    "DecontaminateConfig",
    "Dtype",
    "EvaluateConfig",
    "FilterConfig",
    "GrpoConfig",
    "GuardConfig",
    "HeadroomConfig",
    "LoraConfig",
    "ModelConfig",
    "OpdConfig",
    "PresampleConfig",
    "PromptConfig",
    "PromptFormat",
    "QuestionsConfig",
    "RewardsConfig",
    "RolloutsConfig",
    "RunConfig",
    "SamplerConfig",
    "Section",
    "SftConfig",
    "SourceConfig",
    "SourceKind",
    "VariantConfig",
    "WandbConfig",
    "WarmstartConfig",
    "WorkersConfig",
    "check_consistency",
]


class SourceKind(StrEnum):
    """Where questions can come from."""

    GSM8K = "gsm8k"
    SVAMP = "svamp"
    MATH500 = "math500"
    DEEPMATH = "deepmath"
    FILE = "file"
    SYMBOLIC = "symbolic"


class PromptFormat(StrEnum):
    """The prompt formats shipped in `ratchet/prompts/`."""

    GSM8K_HASH = "gsm8k_hash"
    TAGS = "tags"
    TAGS_EXAMPLE = "tags_example"
    BOXED = "boxed"
    TAGS_SHORT = "tags_short"
    HASH_SHORT = "hash_short"
    BOXED_SHORT = "boxed_short"


Dtype = Literal["float32", "bfloat16"]


class ModelConfig(Section):
    """The model that is made better."""

    path: str = Field(default="seedling", min_length=1)
    """Hub id, local directory, or a packaged model: 'seedling', 'smollm2-135m-instruct'."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); none for local models."""
    dtype: Dtype = "float32"
    """Number format in which the model is sampled and trained."""
    enable_thinking: bool = False
    """Passed to the chat template of models that can think before they answer."""
    max_model_len: int | None = Field(default=None, ge=32)
    """Context limit in tokens; the model's own when left out."""


class SourceConfig(Section):
    """One source of questions and the slice taken of it."""

    kind: SourceKind
    """Which source."""
    name: str | None = None
    """Label in tables and reports; the kind when left out."""
    path: str | None = None
    """Hub id or local file or folder; the source's own hub id when left out."""
    revision: str | None = None
    """Hub revision."""
    split: str | None = None
    """Split of the data set; 'train' for training roles and 'test' for held-out ones by default."""
    offset: int = Field(default=0, ge=0)
    """Rows skipped at the start."""
    limit: int | None = Field(default=None, ge=1)
    """Rows taken after the offset; all when left out."""
    shuffle_seed: int | None = None
    """Shuffle with this seed before offset and limit are applied; source order when left out."""
    columns: dict[str, str] = Field(default_factory=dict)
    """For 'file': our column (question, gold, reference_solution, difficulty) to the file's."""
    templates: Literal["seen", "heldout", "all"] = "seen"
    """For 'symbolic': which templates; 'heldout' ones are never trained on."""
    count: int = Field(default=1000, ge=1)
    """For 'symbolic': how many questions are drawn."""
    seed: int = 0
    """For 'symbolic': seed of the drawn numbers and names."""
    min_steps: int = Field(default=1, ge=1, le=5)
    """For 'symbolic': fewest reasoning steps."""
    max_steps: int = Field(default=5, ge=1, le=5)
    """For 'symbolic': most reasoning steps."""

    @property
    def label(self) -> str:
        """Name in tables and reports."""
        return self.name or self.kind.value


class QuestionsConfig(Section):
    """The questions of a run, by role."""

    train: tuple[SourceConfig, ...] = Field(min_length=1)
    """Questions that presampling and RL draw from."""
    warmup: tuple[SourceConfig, ...] = ()
    """Questions with reference solutions for a warm-start with `warmstart.data = 'source'`."""
    dev: tuple[SourceConfig, ...] = ()
    """Held-out questions for benchmark and checkpoint choice."""
    test: tuple[SourceConfig, ...] = Field(min_length=1)
    """Held-out questions for the final comparison, touched once per variant."""
    max_prompt_tokens: int = Field(default=512, ge=8)
    """Rows with a longer rendered prompt are dropped at the door and counted."""


class DecontaminateConfig(Section):
    """No training question that gives a held-out one away."""

    words: int = Field(default=13, ge=0)
    """Training rows sharing this many consecutive words with a held-out one go; 0 = only the same
    text."""


class PromptConfig(Section):
    """How a question is put to the model."""

    format: PromptFormat = PromptFormat.TAGS_EXAMPLE
    """Prompt format; it also decides where the answer must stand."""


class SamplerConfig(Section):
    """The engine that generates."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """'auto' takes vLLM where it is installed, transformers elsewhere."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Longest completion in tokens, in every stage."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Sequences generated at once."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the device's memory that a stand-alone vLLM engine may take."""


class BenchmarkConfig(Section):
    """Measure prompt formats, thinking and decoding before anything else."""

    formats: tuple[PromptFormat, ...] = ()
    """Formats compared; only the run's own when empty."""
    thinking: tuple[bool, ...] = ()
    """Each with thinking off (false) and on (true); as `model.enable_thinking` when empty."""
    decoding: tuple[Literal["greedy", "model"], ...] = Field(default=("greedy",), min_length=1)
    """'greedy', and 'model': one sample a question with the sampling settings it comes with."""
    role: Literal["dev", "test", "train"] = "dev"
    """Questions of this role; a prompt for the run is to be chosen on dev questions only."""
    source: str | None = Field(default=None, min_length=1)
    """Only questions of the source of this name; all of the role's when left out."""
    limit: int = Field(default=200, ge=1)
    """Questions used."""


class PresampleConfig(Section):
    """Sample every training question before training."""

    k: int = Field(default=8, ge=2)
    """Completions per question."""
    k_block: int = Field(default=8, ge=1)
    """Completions drawn per shard, so that k can grow in these steps without resampling."""
    shard_questions: int = Field(default=1024, ge=1)
    """Questions per shard; a killed run loses at most one shard, but many small ones keep a GPU
    less busy."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    after_warmstart: bool = False
    """Sample the warm-started model instead of the starting one."""

    @model_validator(mode="after")
    def _whole_blocks(self) -> PresampleConfig:
        if self.k % self.k_block:
            raise ValueError(
                f"k={self.k} must be a multiple of k_block={self.k_block}: set k_block too"
            )
        return self


class FilterConfig(Section):
    """Which questions RL trains on."""

    score: Literal["lenient", "strict"] = "lenient"
    """Which verdict the pass rate counts."""
    keep_above: float = Field(default=0.0, ge=0, le=1)
    """Questions at or below this pass rate are dropped."""
    keep_below: float = Field(default=1.0, ge=0, le=1)
    """Questions at or above this pass rate are dropped."""
    easy_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the always-right questions kept for RL all the same."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the questions between the bounds that is held back from RL for the warm-start."""

    @model_validator(mode="after")
    def _ordered(self) -> FilterConfig:
        if self.keep_above >= self.keep_below:
            raise ValueError(
                f"keep_above={self.keep_above} must be smaller than keep_below={self.keep_below}"
            )
        return self


class RolloutsConfig(Section):
    """Choose RL's questions from what an earlier RL run logged, in place of presampling."""

    path: str | None = Field(default=None, min_length=1)
    """RUN/grpo of this store, or a file or folder: TRL's completions, a wandb run or its tables."""
    reward: str | None = Field(default=None, min_length=1)
    """Column that tells right from wrong; when left out, recorded verdicts or our verifier do."""
    threshold: float = 0.5
    """From this value on, `reward` means right."""
    first_steps: int | None = Field(default=None, ge=1)
    """Use the first so many logged steps only, whose policy is nearest to the starting model."""
    last_steps: int | None = Field(default=None, ge=1)
    """Use the last so many logged steps only, whose policy is nearest to the trained model."""

    @model_validator(mode="after")
    def _one_end(self) -> RolloutsConfig:
        if self.first_steps is not None and self.last_steps is not None:
            raise ValueError("set first_steps or last_steps, not both")
        return self


class HeadroomConfig(Section):
    """Go on only where there is something to gain."""

    min_live_share: float = Field(default=0.0, ge=0, le=1)
    """Stop when fewer of the RL groups than this are expected to be live; 0 = go on whatever."""


class RewardsConfig(Section):
    """What a completion is paid for."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Reward name (or dotted path 'package.module:function') to weight; the answer style's
    defaults when empty."""


class WandbConfig(Section):
    """Weights & Biases logging; one group per run, one job type per stage."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """'offline' writes to the run's folder for a later `wandb sync`."""
    project: str = "ratchet"
    """Project name."""


class RunConfig(Section):
    """A whole run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Short name; lower case, digits, dot, dash and underscore."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling, shuffling and training."""
    model: ModelConfig = ModelConfig()
    """The model that is made better."""
    questions: QuestionsConfig
    """The questions, by role."""
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    """No training question that gives a held-out one away."""
    prompt: PromptConfig = PromptConfig()
    """How a question is put to the model."""
    sampler: SamplerConfig = SamplerConfig()
    """The engine that generates."""
    workers: WorkersConfig = WorkersConfig()
    """Who does the sampling; changes no result."""
    benchmark: BenchmarkConfig = BenchmarkConfig()
    """Measure prompt formats, thinking and decoding before anything else."""
    presample: PresampleConfig = PresampleConfig()
    """Sample every training question before training."""
    rollouts: RolloutsConfig = RolloutsConfig()
    """Choose RL's questions from what an earlier RL run logged, in place of presampling."""
    filter: FilterConfig = FilterConfig()
    """Which questions RL trains on."""
    headroom: HeadroomConfig = HeadroomConfig()
    """Go on only where there is something to gain."""
    rewards: RewardsConfig = RewardsConfig()
    """What a completion is paid for."""
    warmstart: WarmstartConfig = WarmstartConfig()
    """What happens before RL."""
    sft: SftConfig = SftConfig()
    """Supervised fine-tuning."""
    opd: OpdConfig = OpdConfig()
    """On-policy distillation."""
    grpo: GrpoConfig = GrpoConfig()
    """Reinforcement learning."""
    audit: AuditConfig = AuditConfig()
    """Prove before training that sampler and trainer are one policy."""
    guard: GuardConfig = GuardConfig()
    """Halt RL when the sampler is no longer the trainer's policy."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """The final comparison."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases logging."""

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        check_consistency(self)
        return self


def check_consistency(config: RunConfig) -> None:
    """ValueError when sections contradict each other."""
    warm, grpo = config.warmstart, config.grpo
    if config.name == "latest":
        raise ValueError("name = 'latest' always means the newest run: choose another name")
    if config.presample.after_warmstart and (warm.method == "none" or warm.data != "source"):
        raise ValueError(
            "presample.after_warmstart needs warmstart.method = 'sft' or 'opd' and "
            "warmstart.data = 'source': the filter's dropped questions don't exist yet then"
        )
    if config.filter.warmup_share and (warm.method == "none" or warm.data != "dropped"):
        raise ValueError(
            "filter.warmup_share holds questions back for a warm-start: it needs "
            "warmstart.method = 'sft' or 'opd' and warmstart.data = 'dropped'"
        )
    if warm.method == "sft" and config.sft.samples != "none" and warm.data != "dropped":
        raise ValueError(
            f"sft.samples = '{config.sft.samples}' needs warmstart.data = 'dropped': only training "
            "questions are sampled before the warm-start"
        )
    if warm.method == "sft" and config.sft.samples != "none" and config.rollouts.path is not None:
        raise ValueError(
            f"sft.samples = '{config.sft.samples}' needs presampling: leave rollouts.path out"
        )
    if warm.method != "none" and warm.data == "source" and not config.questions.warmup:
        raise ValueError("warmstart.data = 'source' needs at least one source in questions.warmup")
    if warm.method == "opd" and config.opd.teacher is None:
        raise ValueError("warmstart.method = 'opd' needs opd.teacher")
    batch = grpo.prompts_per_step * grpo.group_size // grpo.processes
    if batch % grpo.micro_batch_size:
        each = "" if grpo.processes == 1 else f" / processes ({grpo.processes})"
        raise ValueError(
            f"grpo.micro_batch_size={grpo.micro_batch_size} must divide prompts_per_step × "
            f"group_size{each} = {batch}"
        )
    for name, part in (("sft", config.sft), ("opd", config.opd)):
        if part.batch_size % part.micro_batch_size:
            raise ValueError(
                f"{name}.micro_batch_size={part.micro_batch_size} must divide {name}.batch_size="
                f"{part.batch_size}"
            )
    labels = [source.label for source in config.questions.test]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"two sources of questions.test are called '{label}': give one another name, each "
                "is a benchmark of its own"
            )
    if grpo.sync == "adapter" and not grpo.lora.enabled:
        raise ValueError("grpo.sync = 'adapter' needs grpo.lora.enabled = true")
    if grpo.vllm_server_device is not None and grpo.vllm_mode != "server":
        raise ValueError("grpo.vllm_server_device needs grpo.vllm_mode = 'server'")
    limit = config.model.max_model_len
    need = config.questions.max_prompt_tokens + config.sampler.max_completion_tokens
    if limit is not None and need > limit:
        raise ValueError(
            f"questions.max_prompt_tokens + sampler.max_completion_tokens = {need} exceeds "
            f"model.max_model_len = {limit}: lower one of them"
        )
