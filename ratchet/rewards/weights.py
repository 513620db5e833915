"""What a run pays for: its rewards by name, their weights, and the weighted sum.

A reward is named as in `functions.REWARDS`, or by the `package.module:function` path of a user's
own. The hash of the file behind each of those enters the keys of what it scored.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path

from ratchet.errors import UserError
from ratchet.rewards.functions import REWARDS, RewardFunction
from ratchet.store.keys import file_hash
from ratchet.verifier import Style

DEFAULT_WEIGHTS_TAGS: dict[str, float] = {
    "exact_check": 2.0,
    "correctness_check": 1.0,
    "lenient_correctness_check": 0.5,
    "format_check": 0.5,
    "tag_check": 1.0,
    "step_check": 0.5,
    "solution_number_check": 0.25,
}
DEFAULT_WEIGHTS_BOXED: dict[str, float] = {"boxed_correctness": 1.0, "boxed_format": 0.1}


def default_weights(style: str) -> dict[str, float]:
    """The weights of a run that sets none, by the style of its answers."""
    return dict(DEFAULT_WEIGHTS_BOXED if style == Style.BOXED else DEFAULT_WEIGHTS_TAGS)


def resolve_rewards(weights: Mapping[str, float]) -> list[tuple[str, RewardFunction, float]]:
    """(name, function, weight) of every reward named in `weights`, in its order.

    A name with a colon, `package.module:function`, loads a function of the user's own. UserError
    for a name that is not there, naming the nearest right one."""
    return [(name, reward_named(name), float(weight)) for name, weight in weights.items()]


def reward_named(name: str) -> RewardFunction:
    """The reward function called `name`, or the one at a `module:function` path."""
    if ":" in name:
        return own_reward(name)
    if name in REWARDS:
        return REWARDS[name]
    near = get_close_matches(name, REWARDS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(REWARDS)}"
    raise UserError(f"no reward is called '{name}': {hint} (your own: 'package.module:function')")


def own_reward(path: str) -> RewardFunction:
    """The function at `package.module:function`. UserError if it cannot be loaded."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"reward '{path}': cannot import {module_name} ({error})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        near = get_close_matches(attribute, dir(module), n=1)
        hint = f": did you mean '{near[0]}'?" if near else ""
        raise UserError(f"reward '{path}': {module_name} has no function '{attribute}'{hint}")
    return function


def fingerprints(weights: Iterable[str]) -> dict[str, str]:
    """Hash of the file behind each of the user's own rewards, by name, for artifact keys.

    UserError for a reward that is not there."""
    found: dict[str, str] = {}
    for name in weights:
        reward_named(name)
        if ":" in name:
            source = importlib.import_module(name.partition(":")[0]).__file__
            assert source is not None, name
            found[f"reward {name}"] = file_hash(Path(source))
    return found


def total_reward(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The weighted sum of one completion's rewards; those that do not apply count as zero."""
    return float(sum(Fraction(w) * Fraction(rewards[n] or 0.0) for n, w in weights.items()))
