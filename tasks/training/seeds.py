"""What makes a run repeat itself: the order of its data and its seeds, functions of the run's seed
and the step alone.

The order is laid out before training and read in sequence, so a resumed run only has to skip ahead.
"""

from __future__ import annotations

import hashlib
import random


def training_order(num_examples: int, num_rows: int, seed: int) -> list[int]:
    """`num_rows` example indices: whole passes, each shuffled anew, the last one cut."""
    shuffler = random.Random(seed)
    order: list[int] = []
    while len(order) < num_rows:
        one_pass = list(range(num_examples))
        shuffler.shuffle(one_pass)
        order += one_pass
    return order[:num_rows]


def step_seed(seed: int, step: int, rank: int, draw: int = 0) -> int:
    """A seed of its own for every (run, step, process) and every further draw within a step."""
    parts = (seed, step, rank, draw) if draw else (seed, step, rank)
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big")
