"""Rewards as a trainer calls them: the style's own unless set, one finite number per completion."""

from __future__ import annotations

import math

import pytest

from ratchet.errors import UserError
from ratchet.rewards.checked import CheckedReward, checked_rewards
from ratchet.rewards.weights import DEFAULT_WEIGHTS_BOXED, DEFAULT_WEIGHTS_TAGS
from ratchet.verifier import Style
from tests.support.tiny_grpo import letters


def test_rewards_are_the_styles_own_unless_set() -> None:
    rewards, weights = checked_rewards(None, Style.TAGS)
    assert [reward.__name__ for reward in rewards] == list(DEFAULT_WEIGHTS_TAGS)
    assert sum(weights) == 5.75
    rewards, _ = checked_rewards(None, Style.BOXED)
    assert [reward.__name__ for reward in rewards] == list(DEFAULT_WEIGHTS_BOXED)
    rewards, weights = checked_rewards({"tests.support.tiny_grpo:letters": 0.5}, Style.TAGS)
    assert (rewards[0].__name__, weights) == ("tests.support.tiny_grpo:letters", [0.5])


def test_a_reward_must_return_one_finite_number_each() -> None:
    good = CheckedReward("letters", letters)
    assert good(["ab1c", ""], gold=["1", "2"]) == [0.75, 0.0]
    assert CheckedReward("none", lambda completions, **_: [None])(["a"]) == [None]
    with pytest.raises(UserError, match="'short' returned 1 values for 2 completions"):
        CheckedReward("short", lambda completions, **_: [1.0])(["a", "b"])
    for bad in (math.nan, math.inf):
        with pytest.raises(UserError, match=f"'bad' returned {bad}: return a finite number"):
            CheckedReward("bad", lambda completions, bad=bad, **_: [bad])(["a"])
