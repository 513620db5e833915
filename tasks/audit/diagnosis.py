"""From what was measured to what is wrong: the decision rule of the audit and of the drift guard.

Findings of the probes come first, in the order of the way that weights take (configuration, wire,
engine, cache), because a fault upstream shows downstream as well. Where no probe has seen a cause,
three log-probabilities of the same tokens decide: as the sampler reported them when it drew the
tokens (`generated`), as it gives them when it reads them (`prompt`, which never touches the prefix
cache), and as the trainer computes them in train mode (`trainer`).

| prompt = trainer | generated = prompt | the cause lies in |
|---|---|---|
| no | yes | the weights, or the trainer's forward pass |
| yes | no | a stale cache, or the sampling parameters |
| no | no | the weights first; then look again |
| yes | yes | nothing, unless the draws betray another distribution (`surprise`) |

Pure: numbers in, words out. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CHANCE = 5.0
"""Standard errors beyond which a mean isn't where it should be."""
ONE_SIDED = 0.9
"""Share of tokens whose generated log-probability is above the other from which a difference is
one-sided: a truncated or sharpened distribution raises what it draws, a stale cache scatters."""


class Probe(StrEnum):
    """Where the audit looks."""

    CONFIGURATION = "P0"
    WIRE = "P1"
    WEIGHTS = "P2"
    LOGPROBS = "P3"
    CACHE = "P4"


class Cause(StrEnum):
    """What makes two policies of one."""

    NONE = "none"
    NUMBER_FORMAT = "number format"
    LOGPROBS_MODE = "log-prob mode"
    QUANTISED = "quantised sampler"
    DROPOUT = "dropout"
    VOCABULARY = "vocabulary"
    NAMES = "names missing"
    RANK = "rank or targets"
    SAMPLING = "sampling parameters"
    WIRE_DTYPE = "number format on the wire"
    UNMERGED = "unmerged before it was sent"
    WRONG_ON_WIRE = "wrong weights on the wire"
    MERGE_ROUNDING = "merge rounding"
    NOT_LOADED = "weights not loaded"
    TIED = "tied weights"
    ROUNDED = "rounded weights"
    WEIGHTS = "weights"
    STALE_CACHE = "stale prefix cache"
    CACHE_OR_SAMPLING = "stale cache or sampling parameters"
    WEIGHTS_OR_FORWARD = "weights or the trainer's forward pass"
    GROWTH = "growth from sync to sync"


ADVICE: dict[Cause, str] = {
    Cause.NONE: "Nothing to do.",
    Cause.NUMBER_FORMAT: "Give the engine the trainer's dtype explicitly.",
    Cause.LOGPROBS_MODE: "Start the engine with logprobs_mode = 'processed_logprobs'.",
    Cause.QUANTISED: "Sample from unquantised weights, or train the quantised model's own way.",
    Cause.DROPOUT: "Set every dropout of model and adapter to 0: the sampler has none.",
    Cause.VOCABULARY: "Give both sides the same number of embedding rows: the softmax runs over "
    "all of them.",
    Cause.NAMES: "Look at how the trainer's names become the sampler's.",
    Cause.RANK: "Make the engine with room for the adapter's rank and targets, or use "
    "grpo.sync = 'merged'.",
    Cause.SAMPLING: "Set top_p = 1, top_k = 0, min_p = 0, no penalties and the trainer's "
    "temperature in every request, and start the engine with generation_config = 'vllm'.",
    Cause.WIRE_DTYPE: "Cast to the engine's dtype before sending, and announce that dtype.",
    Cause.UNMERGED: "Copy each tensor as it is handed out (`tensor.clone()`), or use "
    "grpo.sync = 'adapter', which merges nothing.",
    Cause.WRONG_ON_WIRE: "Look at what collects the tensors between trainer and sampler.",
    Cause.MERGE_ROUNDING: "Use grpo.sync = 'adapter', or merge into a copy in float32.",
    Cause.NOT_LOADED: "Look at the answer to the weight update and at the sampler's log (out of "
    "memory in its buffer?): the update was accepted and not carried out.",
    Cause.TIED: "Load the head again after the embedding, packed copies included.",
    Cause.ROUNDED: "Look for quantisation or a narrower number format between wire and engine.",
    Cause.WEIGHTS: "Look at how the sampler loads the layers named here.",
    Cause.STALE_CACHE: "Reset the prefix cache after each sync and check the answer.",
    Cause.CACHE_OR_SAMPLING: "Reset the prefix cache and check the answer; then compare the "
    "sampling parameters.",
    Cause.WEIGHTS_OR_FORWARD: "Compare the weights layer by layer (`ratchet audit-sync`); if they "
    "agree, look for dropout, another attention kernel or autocast in the trainer.",
    Cause.GROWTH: "Look for rounding that adds up, or state that a sync doesn't renew.",
}
"""What to do about each cause."""

PROBE_ORDER = (Probe.CONFIGURATION, Probe.WIRE, Probe.WEIGHTS, Probe.CACHE, Probe.LOGPROBS)
"""Order in which findings count."""


@dataclass(frozen=True)
class Gap:
    """How far two log-probabilities of the same tokens are apart, in nats per token."""

    mean: float
    max: float

    def beyond(self, limit: Gap) -> bool:
        """Whether the mean or the maximum exceeds that of `limit` (or is not a number)."""
        return not (self.mean <= limit.mean and self.max <= limit.max)


@dataclass(frozen=True)
class Finding:
    """Something that a probe has seen and can name."""

    probe: Probe
    cause: Cause
    words: str
    """What was seen, with names and figures; a clause without a full stop."""


@dataclass(frozen=True)
class Gaps:
    """What is known. Whoever has no probes gives the log-probabilities alone."""

    limit: Gap
    """What rounding explains in the run's number format."""
    generated_trainer: Gap | None = None
    prompt_trainer: Gap | None = None
    generated_prompt: Gap | None = None
    train_eval: Gap | None = None
    """The trainer in train mode against the trainer in evaluation mode."""
    generated_above: float | None = None
    """Share of tokens whose generated log-probability is above the prompt one."""
    surprise: tuple[float, float] | None = None
    """Mean over sampled tokens of the trainer's log p + entropy there, and its standard error: 0
    if the draws come from the trainer's distribution."""
    findings: tuple[Finding, ...] = ()
    """What the probes have found."""


@dataclass(frozen=True)
class Diagnosis:
    """The likely cause."""

    cause: Cause
    probe: Probe | None
    """The probe that shows it; None when nothing is wrong."""
    words: str
    """What was seen and what to do, in whole sentences."""

    @property
    def ok(self) -> bool:
        """Whether trainer and sampler are one policy, as far as was measured."""
        return self.cause is Cause.NONE


def diagnose(gaps: Gaps) -> Diagnosis:
    """The likeliest cause of what was measured."""
    for probe in PROBE_ORDER:
        for finding in gaps.findings:
            if finding.probe is probe:
                return _diagnosis(finding.cause, probe, finding.words)
    cause, words = by_logprobs(gaps)
    return _diagnosis(cause, None if cause is Cause.NONE else Probe.LOGPROBS, words)


def betrayed(surprise: tuple[float, float] | None) -> bool:
    """Whether the draws come from another distribution than the trainer's, beyond chance."""
    return surprise is not None and abs(surprise[0]) > CHANCE * surprise[1]


def by_logprobs(gaps: Gaps) -> tuple[Cause, str]:
    """The cause that the log-probabilities alone point to, and what they show."""
    beyond = {
        name: gap is not None and gap.beyond(gaps.limit)
        for name, gap in (
            ("train_eval", gaps.train_eval),
            ("prompt_trainer", gaps.prompt_trainer),
            ("generated_prompt", gaps.generated_prompt),
            ("generated_trainer", gaps.generated_trainer),
        )
    }
    if beyond["train_eval"]:
        seen = _gap("the trainer in train mode and in evaluation mode differ", gaps.train_eval)
        return Cause.DROPOUT, seen
    if beyond["prompt_trainer"]:
        same = "" if beyond["generated_prompt"] else ", who agrees with itself"
        words = f"the sampler, reading given tokens, differs from the trainer{same}:"
        return Cause.WEIGHTS_OR_FORWARD, _gap(words, gaps.prompt_trainer)
    if beyond["generated_prompt"]:
        words = (
            "the sampler, generating, differs from itself reading, which agrees with the trainer:"
        )
        return _cache_or_sampling(gaps), _gap(words, gaps.generated_prompt)
    if beyond["generated_trainer"]:  # the only one that is known
        words = "the sampler's log-probabilities differ from the trainer's:"
        return Cause.WEIGHTS_OR_FORWARD, _gap(words, gaps.generated_trainer)
    if betrayed(gaps.surprise):
        assert gaps.surprise is not None
        mean, error = gaps.surprise
        words = (
            "all log-probabilities agree, but the tokens were not drawn from that distribution: "
            f"their log p plus its entropy is {mean:+.3f} ± {error:.3f} instead of 0"
        )
        return Cause.SAMPLING, words
    return Cause.NONE, "sampler and trainer agree on every token"


def _cache_or_sampling(gaps: Gaps) -> Cause:
    if gaps.generated_above is None:
        return Cause.CACHE_OR_SAMPLING
    return Cause.SAMPLING if gaps.generated_above >= ONE_SIDED else Cause.STALE_CACHE


def _gap(words: str, gap: Gap | None) -> str:
    assert gap is not None
    return f"{words} {gap.mean:.1e} nats per token on average, {gap.max:.1e} at most"


def _diagnosis(cause: Cause, probe: Probe | None, words: str) -> Diagnosis:
    said = f"{words[0].upper()}{words[1:]}."
    return Diagnosis(cause, probe, said if cause is Cause.NONE else f"{said} {ADVICE[cause]}")
