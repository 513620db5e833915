"""Rewards worked out by hand, and the table that holds them."""

from __future__ import annotations

import pytest

from ratchet.errors import UserError
from ratchet.questions.rewrite import rewrite_solution
from ratchet.rewards.functions import REWARDS
from ratchet.rewards.weights import (
    DEFAULT_WEIGHTS_BOXED,
    DEFAULT_WEIGHTS_TAGS,
    resolve_rewards,
    total_reward,
)

QUESTION = "Ann sold 48 clips in April and half as many in May. How many did she sell?"
SOLUTION = "In May 48/2 = <<48/2=24>>24 clips.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"
PERFECT = rewrite_solution(SOLUTION, "72", "tags")


def score(completion: str, style: str = "tags", gold: str = "72") -> dict[str, float | None]:
    columns = {
        "gold": [gold],
        "question": [QUESTION],
        "reference_solution": [SOLUTION],
        "style": [style],
    }
    return {name: f(completions=[completion], **columns)[0] for name, f in REWARDS.items()}


def test_perfect_completion_scores_5_25() -> None:
    rewards = score(PERFECT)
    assert total_reward(rewards, DEFAULT_WEIGHTS_TAGS) == 5.25


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (
            "tags",
            "<start_working_out>\nIn May 48/2 = 24 clips.\nTogether 48+24 = 72.\n"
            "<end_working_out>\n<SOLUTION>72</SOLUTION>",
        ),
        ("hash", "In May 48/2 = 24 clips.\nTogether 48+24 = 72.\n#### 72"),
        ("boxed", "In May 48/2 = 24 clips.\nTogether 48+24 = 72.\n\\boxed{72}"),
        ("plain", "In May 48/2 = 24 clips.\nTogether 48+24 = 72.\n72"),
    ],
)
def test_rewrite(style: str, text: str) -> None:
    assert rewrite_solution(SOLUTION, "72", style) == text


def test_rewrite_drops_thousands_commas() -> None:
    assert rewrite_solution("a\n#### 1,080", "1,080", "hash") == "a\n#### 1080"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        # right, but nothing of the format: anywhere 0.5
        ("The answer is 72.", 0.5),
        # wrong answer in the exact format, one of one intermediate results:
        # format 0.5 + tags 0.5 + steps 0.5 + bare number 0.25
        (PERFECT.replace("<SOLUTION>72", "<SOLUTION>73").replace("= 72", "= 73"), 1.75),
        # every tag twice: no tag reward, no format; <SOLUTION> twice is not readable
        (PERFECT + PERFECT, 0.5 + 0.5),
        ("", 0.0),
    ],
)
def test_total(completion: str, expected: float) -> None:
    assert total_reward(score(completion), DEFAULT_WEIGHTS_TAGS) == pytest.approx(expected)


def test_step_check_does_not_pay_for_lists() -> None:
    listed = " ".join(str(n) for n in range(200))
    rewards = score(PERFECT.replace("In May", listed))
    # 0 to 199 but for 24, 48, 72 (half is no number) are stray: 197, where 4 + 1 step are allowed
    assert rewards["step_check"] == pytest.approx((5 / 197) ** 2)


def test_step_check_none_without_steps() -> None:
    columns = {"gold": ["72"], "question": [QUESTION], "style": ["tags"]}
    for solution in (None, "", "It is 72.\n#### 72"):
        assert REWARDS["step_check"]([PERFECT], reference_solution=[solution], **columns) == [None]


@pytest.mark.parametrize(
    ("completion", "correct", "form"),
    [("so \\boxed{72}", 1.0, 1.0), ("\\boxed{7} \\boxed{72}", 0.0, 0.0), ("72", 0.0, 0.0)],
)
def test_boxed(completion: str, correct: float, form: float) -> None:
    rewards = score(completion, "boxed")
    assert (rewards["boxed_correctness"], rewards["boxed_format"]) == (correct, form)
    assert set(DEFAULT_WEIGHTS_BOXED) == {"boxed_correctness", "boxed_format"}


def test_hash_style() -> None:
    rewards = score("48/2 = 24 and 48+24 = 72\n#### 72", "hash")
    assert rewards == {
        "exact_check": 1.0,
        "correctness_check": 1.0,
        "lenient_correctness_check": 1.0,
        "format_check": 1.0,
        "tag_check": None,
        "step_check": 1.0,
        "solution_number_check": 1.0,
        "boxed_correctness": 1.0,
        "boxed_format": 0.0,
    }


def test_unreadable_gold_pays_nothing() -> None:
    rewards = score(PERFECT, gold="seventy-two")
    assert rewards["exact_check"] is None
    assert rewards["correctness_check"] is None
    assert rewards["lenient_correctness_check"] is None


def test_chat_messages() -> None:
    reward = REWARDS["exact_check"]
    message = [{"role": "assistant", "content": PERFECT}]
    assert reward(completions=[message], gold=["72"], style=["tags"]) == [1.0]


def test_names_are_the_table_s() -> None:
    assert all(function.__name__ == name for name, function in REWARDS.items())


def test_resolve() -> None:
    resolved = resolve_rewards({"exact_check": 2, "json:dumps": 1})
    assert [(name, weight) for name, _, weight in resolved] == [
        ("exact_check", 2.0),
        ("json:dumps", 1.0),
    ]
    with pytest.raises(UserError, match="did you mean 'exact_check'"):
        resolve_rewards({"exact_chek": 1})
    with pytest.raises(UserError, match="cannot import nowhere"):
        resolve_rewards({"nowhere:f": 1})
    with pytest.raises(UserError, match="did you mean 'dumps'"):
        resolve_rewards({"json:dumpss": 1})
