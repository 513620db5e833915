"""What GRPO trains on: the RL questions as prompts, in an order laid out before training.

The rows a run will see, step after step, are chosen here: shuffled passes over the questions, one
after the other. The trainer reads them in sequence, as a single epoch, so the data of step s
depends on the seed and s alone, also after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from ratchet.config.run import PromptConfig
from ratchet.errors import UserError
from ratchet.prompts import STYLE_OF, answer_start, prompt_ids, prompt_text
from ratchet.store.store import Artifact
from tasks.training.seeds import training_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("question_id", "question", "gold", "reference_solution")


@dataclass(frozen=True)
class Prompts:
    """The questions of a run and how each is put to the model."""

    rows: list[dict[str, Any]]
    """One per question: `prompt` (text) and the columns that rewards may read."""
    ids: dict[str, list[int]]
    """Token ids by prompt text."""

    @property
    def longest(self) -> int:
        """Tokens in the longest prompt."""
        return max(len(ids) for ids in self.ids.values())

    @property
    def prefilled(self) -> str:
        """What the chat template writes of every answer: an opening tag or `<think>`, mostly
        nothing. Verifier and rewards read it before the completion."""
        return answer_start(self.rows[0]["prompt"])

    def ordered(self, count: int, seed: int) -> Dataset:
        """`count` rows in training order."""
        return Dataset.from_list(self.rows).select(training_order(len(self.rows), count, seed))


def rl_questions(inputs: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Rows of the questions chosen for RL, in the order of the selection; UserError for none."""
    selection = inputs["selection"].table("selection", ["question_id", "role"]).to_pylist()
    chosen = [row["question_id"] for row in selection if row["role"] == "rl"]
    if not chosen:
        raise UserError(
            f"none of the {len(selection)} questions was selected for RL: see the filter stage "
            "for why, then widen filter.keep_above / filter.keep_below or sample other questions"
        )
    questions = inputs["questions"].table("questions", list(COLUMNS)).to_pylist()
    by_id = {row["question_id"]: row for row in questions}
    return [by_id[question_id] for question_id in chosen]


def build_prompts(
    questions: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    prompt: PromptConfig,
    *,
    enable_thinking: bool,
) -> Prompts:
    """Render every question once."""
    rows = []
    ids: dict[str, list[int]] = {}
    for question in questions:
        text = prompt_text(
            tokenizer, prompt.format, question["question"], enable_thinking=enable_thinking
        )
        ids[text] = prompt_ids(
            tokenizer, prompt.format, question["question"], enable_thinking=enable_thinking
        )
        rows.append({"prompt": text, **question, "style": STYLE_OF[prompt.format].value})
    return Prompts(rows, ids)
