"""Verifier audit: does the verifier accept what is right and reject what is not?

On a source of questions: every gold answer must accept itself, and the reference solution in the
answer's own format where there is one; the gold answer of another question must be rejected unless
it is the same value. On the adversarial cases of `data/verifier`: the shares of false accepts and
false rejects. Beside them the rate of each status and the throughput.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.config.run import SourceConfig, SourceKind
from ratchet.errors import UserError
from ratchet.places import DATA
from ratchet.questions.base import Question
from ratchet.questions.files import table_files
from ratchet.questions.load import Role, load_source
from ratchet.questions.rewrite import rewrite_solution
from ratchet.verifier import Status, Style, status_rates, verify_batch
from ratchet.verifier.verify import gold_number

CASES = DATA / "verifier" / "adversarial.jsonl"
MAX_PAIRS = 3_000
MAX_LISTED = 10
WRAPPED = {
    Style.TAGS: "<start_working_out>working<end_working_out>\n<SOLUTION>{}</SOLUTION>",
    Style.BOXED: "so \\boxed{{{}}}.",
}
ROLES: dict[SourceKind, tuple[Role, ...]] = {
    SourceKind.GSM8K: ("train", "test"),
    SourceKind.SVAMP: ("train", "test"),
    SourceKind.MATH500: ("test",),
}
# Column names that tables of questions commonly have, tried in this order.
COLUMNS: tuple[dict[str, str], ...] = (
    {},
    {"gold": "answer"},
    {"question": "problem", "gold": "answer"},
    {"gold": "final_answer"},
)


@dataclass
class VerifierAudit:
    """The figures of one audit. Counts are of answers."""

    source: str
    style: Style
    num_golds: int = 0
    unacceptable_golds: list[str] = field(default_factory=list)
    num_solutions: int = 0
    rejected_solutions: list[str] = field(default_factory=list)
    num_wrong_pairs: int = 0
    accepted_pairs: list[str] = field(default_factory=list)
    num_adversarial: int = 0
    false_accepts: list[str] = field(default_factory=list)
    false_rejects: list[str] = field(default_factory=list)
    statuses: dict[str, float] = field(default_factory=dict)
    verdicts_per_second: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the verifier made no mistake that this test can see."""
        return not (self.false_accepts or self.false_rejects or self.rejected_solutions)

    def text(self) -> str:
        """The figures for people."""
        right = self.num_golds - len(self.unacceptable_golds)
        solved = self.num_solutions - len(self.rejected_solutions)
        lines = [
            f"{self.source} ({self.style})",
            f"  golds that accept themselves       {right} of {self.num_golds}",
            *listed(self.unacceptable_golds),
            f"  reference solutions accepted       {solved} of {self.num_solutions}",
            *listed(self.rejected_solutions),
            f"  other questions' golds accepted    {len(self.accepted_pairs)} of "
            f"{self.num_wrong_pairs}"
            + (", listed here: each should be the same value" if self.accepted_pairs else ""),
            *listed(self.accepted_pairs),
            f"  adversarial cases                  {self.num_adversarial}, "
            f"{len(self.false_accepts)} false accepts, {len(self.false_rejects)} false rejects",
            *listed(self.false_accepts + self.false_rejects),
            "  statuses                           "
            + ", ".join(f"{name} {rate:.2%}" for name, rate in self.statuses.items() if rate),
            f"  verdicts per second                {self.verdicts_per_second:,.0f}",
        ]
        return "\n".join(lines)


def listed(items: Sequence[str]) -> list[str]:
    """The first items as indented lines."""
    more = [f"      … {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"      {item}" for item in items[:MAX_LISTED]] + more


def audit_verifier(source: str) -> VerifierAudit:
    """Audit the verifier on `source`. UserError where the source cannot be read."""
    questions = questions_of(source)
    golds = [question.gold for question in questions]
    numeric = all(gold_number(gold) is not None for gold in golds)
    result = VerifierAudit(source, Style.TAGS if numeric else Style.BOXED)
    start = time.perf_counter()
    statuses = [
        *audit_golds(result, golds),
        *audit_solutions(result, questions),
        *audit_pairs(result, golds),
        *audit_adversarial(result),
    ]
    result.verdicts_per_second = len(statuses) / (time.perf_counter() - start)
    result.statuses = status_rates(statuses)
    return result


def questions_of(source: str) -> list[Question]:
    """The questions that the name of a kind of source, a file or a folder stands for."""
    path = Path(source).expanduser()
    if not path.exists():
        kinds = [kind.value for kind in SourceKind if kind is not SourceKind.FILE]
        if source not in kinds:
            raise UserError(
                f"no source '{source}': give one of {', '.join(kinds)}, a file or a folder"
            )
        kind = SourceKind(source)
        local = Path(os.environ.get("RATCHET_DATA", "")) / source
        found = str(local) if "RATCHET_DATA" in os.environ and local.exists() else None
        return loaded(SourceConfig(kind=kind, path=found), ROLES.get(kind, ("train",)))
    for kind in (SourceKind.GSM8K, SourceKind.SVAMP, SourceKind.MATH500, SourceKind.DEEPMATH):
        if kind.value in (path.name.lower(), path.parent.name.lower()):
            roles = ROLES.get(kind, ("train",)) if path.is_dir() else ("test",)
            return loaded(SourceConfig(kind=kind, path=str(path)), roles)
    return own_questions(path)


def loaded(config: SourceConfig, roles: tuple[Role, ...]) -> list[Question]:
    """The questions of all roles; of the one table where a folder holds just one."""
    folder = Path(config.path or "")
    if config.path and folder.is_dir() and len(tables := table_files(folder)) == 1:
        return load_source(config.model_copy(update={"path": str(tables[0])}), roles[0])
    return [question for role in roles for question in load_source(config, role)]


def own_questions(path: Path) -> list[Question]:
    """The questions of a table with columns of common names."""
    first: UserError | None = None
    for columns in COLUMNS:
        try:
            config = SourceConfig(kind=SourceKind.FILE, path=str(path), columns=columns)
            return load_source(config, "train")
        except UserError as error:
            first = first or error
    assert first is not None, "COLUMNS is not empty"
    raise first


def audit_golds(result: VerifierAudit, golds: list[str]) -> list[Status]:
    """Every gold answer against itself."""
    completions = [WRAPPED[result.style].format(gold) for gold in golds]
    verdicts = verify_batch(completions, golds, result.style)
    result.num_golds = len(golds)
    for gold, verdict in zip(golds, verdicts, strict=True):
        if not verdict.strict:
            result.unacceptable_golds.append(f"{gold!r}: {verdict.reason}")
    return [verdict.status for verdict in verdicts]


def audit_solutions(result: VerifierAudit, questions: list[Question]) -> list[Status]:
    """Reference solutions as completions: rewritten for tags, as they are for boxed answers."""
    boxed = result.style is Style.BOXED
    chosen = [
        question
        for question in questions
        if question.reference_solution and ("\\boxed" in question.reference_solution or not boxed)
    ]
    completions = [
        question.reference_solution or ""
        if boxed
        else rewrite_solution(question.reference_solution or "", question.gold, result.style)
        for question in chosen
    ]
    verdicts = verify_batch(completions, [question.gold for question in chosen], result.style)
    result.num_solutions = len(chosen)
    for question, verdict in zip(chosen, verdicts, strict=True):
        if not verdict.lenient:
            result.rejected_solutions.append(
                f"{question.gold!r} read as {verdict.extracted!r}: {verdict.reason}"
            )
    return [verdict.status for verdict in verdicts]


def audit_pairs(result: VerifierAudit, golds: list[str]) -> list[Status]:
    """Each of the first golds against the gold of the question half the source away."""
    half = len(golds) // 2
    pairs = [
        (gold, golds[(i + half) % len(golds)])
        for i, gold in enumerate(golds[:MAX_PAIRS])
        if gold.strip() != golds[(i + half) % len(golds)].strip()
    ]
    verdicts = verify_batch(
        [WRAPPED[result.style].format(other) for _, other in pairs],
        [gold for gold, _ in pairs],
        result.style,
    )
    result.num_wrong_pairs = len(pairs)
    for (gold, other), verdict in zip(pairs, verdicts, strict=True):
        if verdict.lenient:
            result.accepted_pairs.append(f"{gold!r} accepts {other!r}: {verdict.reason}")
    return [verdict.status for verdict in verdicts]


def audit_adversarial(result: VerifierAudit) -> list[Status]:
    """The adversarial cases: {id, style, gold, completion, right}."""
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    verdicts = verify_batch(
        [case["completion"] for case in cases],
        [case["gold"] for case in cases],
        [case["style"] for case in cases],
    )
    result.num_adversarial = len(cases)
    for case, verdict in zip(cases, verdicts, strict=True):
        if verdict.lenient and not case["right"]:
            result.false_accepts.append(f"false accept {case['id']}: {verdict.reason}")
        elif case["right"] and not verdict.lenient:
            result.false_rejects.append(f"false reject {case['id']}: {verdict.reason}")
    return [verdict.status for verdict in verdicts]
