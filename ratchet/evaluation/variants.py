"""Read what variants answered, and refuse to set side by side what can't be compared.

A variant's answers lie in an artifact of stage 'evaluate'. Variants must have been asked the same
questions, as often, under the same prompt, limits and decoding, and judged by the same verifier;
anything else is a UserError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ratchet.errors import UserError
from ratchet.evaluation.bands import BANDING
from ratchet.evaluation.changed_answers import DECODING
from ratchet.evaluation.comparison import Answers, Variant
from ratchet.store.store import Artifact

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

VARIANT_ORDER = ("baseline", "warmstart", "rl")
SAMPLED = "sampled"
NO_VOTE = -1
NUMBER = re.compile(r"[+-]?[0-9]{1,30}([./](?=[0-9]*[1-9])[0-9]{1,30}|[.]0+)?")
Row = dict[str, Any]

# what must be the same → where the manifest of an evaluation says it
CONDITIONS: dict[str, tuple[str, ...]] = {
    "prompt formats": ("config", "prompt", "format"),
    "texts of the prompt format": ("fingerprints", "prompt"),
    "verifiers": ("summary", "verifier"),
    "engines": ("config", "sampler", "engine"),
    "token limits": ("config", "sampler", "max_completion_tokens"),
    "settings of thinking": ("config", "model", "enable_thinking"),
    "numbers of samples": ("config", "evaluate", "samples"),
    "temperatures": ("config", "evaluate", "temperature"),
}


def variant_names(roles: list[str]) -> list[str]:
    """Variants from the first (what was started from) to the last (what is judged)."""
    names = [role for role in roles if role != "questions"]
    known = [name for name in VARIANT_ORDER if name in names]
    extra = sorted(set(names) - set(known))
    return known[:-1] + extra + known[-1:]


def _condition(artifact: Artifact, path: tuple[str, ...]) -> Any:
    value: Any = getattr(artifact.manifest, path[0])
    for name in path[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def check_same_conditions(variants: Mapping[str, Artifact]) -> None:
    """UserError unless all variants were evaluated under the same conditions."""
    for (name_a, a), (name_b, b) in pairwise(variants.items()):
        for what, path in CONDITIONS.items():
            mine, other = _condition(a, path), _condition(b, path)
            if mine != other:
                raise UserError(
                    f"variants '{name_a}' and '{name_b}' were evaluated with different {what} "
                    f"({mine} and {other}): evaluate both again under one configuration"
                )


def read_questions(artifact: Artifact) -> list[Row]:
    """The test questions, in the table's order. UserError when there are none, or one without a
    band."""
    columns = ["question_id", "source", "role", "question", "gold", "band"]
    rows = artifact.table("questions", columns).to_pylist()
    found = [row for row in rows if row["role"] == "test"]
    if not found:
        raise UserError("there are no test questions: add a source to questions.test")
    bare = [row for row in found if not row["band"]]
    if bare:
        raise UserError(
            f"{len(bare):,} test questions have an empty band, the first is "
            f"{bare[0]['question_id']} of '{bare[0]['source']}': run stage 'questions' again"
        )
    return found


def _grid(name: str, decoding: str, table: pa.Table, question_ids: pa.Array) -> pa.Table:
    """`table` sorted by question and sample, proven to hold every question equally often."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    row = pc.index_in(table.column("question_id"), value_set=question_ids)
    if row.null_count:
        raise UserError(
            f"variant '{name}' answered {row.null_count:,} questions that are not in the test set: "
            "compare variants that were evaluated on the same questions"
        )
    samples = pc.max(table.column("sample_index")).as_py() + 1
    place = row.to_numpy().astype(np.int64) * samples + table.column("sample_index").to_numpy()
    expected = len(question_ids) * samples
    held = len(np.unique(place))
    if held != expected or len(place) != expected:
        raise UserError(
            f"variant '{name}' holds {held:,} of {expected:,} {decoding} answers "
            f"({len(question_ids):,} questions × {samples}): evaluate it again"
        )
    return table.take(pa.array(np.argsort(place)))


def canonical(answer: str) -> str:
    """One text for answers that are the same number or differ in white space or case only."""
    squeezed = "".join(answer.split()).lower()
    plain = squeezed.replace(",", "")
    return str(Fraction(plain)) if NUMBER.fullmatch(plain) else squeezed


def ballots(extracted: list[str | None], lenient: list[bool]) -> list[int]:
    """A number per answer of one question: 0 for right ones (all equal to the gold answer, hence
    to each other), the same one for wrong answers with the same canonical text, −1 for none."""
    seen: dict[str, int] = {}
    return [
        0
        if right
        else NO_VOTE
        if answer is None
        else seen.setdefault(canonical(answer), len(seen) + 1)
        for answer, right in zip(extracted, lenient, strict=True)
    ]


def _ballots_qs(table: pa.Table, num_questions: int) -> np.ndarray:
    import numpy as np

    extracted = table.column("extracted").to_pylist()
    lenient = table.column("lenient").to_pylist()
    size = len(extracted) // num_questions
    return np.array(
        [
            ballots(extracted[start : start + size], lenient[start : start + size])
            for start in range(0, len(extracted), size)
        ]
    )


def _answers(table: pa.Table, num_questions: int) -> Answers:
    def square(column: str) -> Any:
        values = table.column(column).to_numpy()
        return values.reshape(num_questions, -1)

    return Answers(
        strict_qs=square("strict").astype(bool),
        lenient_qs=square("lenient").astype(bool),
        truncated_qs=square("truncated").astype(bool),
        status_qs=square("status"),
        num_tokens_qs=square("num_tokens"),
        ballots_qs=_ballots_qs(table, num_questions),
    )


def read_variant(
    name: str, artifact: Artifact, question_ids: pa.Array
) -> tuple[Variant, list[Row]]:
    """(the variant, its greedy completions in the order of `question_ids`)."""
    import pyarrow.compute as pc

    table = artifact.table("eval")
    texts: list[Row] = []
    answers = {}
    decodings = set(pc.unique(table.column("decoding")).to_pylist()) - {BANDING}
    for decoding in sorted(decodings):
        rows = table.filter(pc.equal(table.column("decoding"), decoding))
        rows = _grid(name, decoding, rows, question_ids)
        answers[decoding] = _answers(rows, len(question_ids))
        if decoding == DECODING:
            columns = ["text", "extracted", "num_tokens", "strict", "lenient"]
            texts = rows.select(columns).to_pylist()
    if not texts:
        raise UserError(f"variant '{name}' holds no {DECODING} answers: evaluate it again")
    return Variant(name, answers), texts


def check_same_answers(variants: list[Variant], samples: int) -> None:
    """UserError unless all variants hold one greedy answer and `samples` sampled ones per
    question."""
    wanted = {DECODING: 1} | ({SAMPLED: samples} if samples else {})
    for variant in variants:
        held = {name: found.num_samples for name, found in variant.answers.items()}
        if held != wanted:
            raise UserError(
                f"variant '{variant.name}' holds {held} answers per question, expected {wanted}: "
                "evaluate it again"
            )
