"""How far sampling is, for the person who watches the run."""

from __future__ import annotations

import time

from ratchet.words import duration
from tasks.runtime.context import StageContext

PROGRESS_SECONDS = 1.0


class Progress:
    """Tells the run how far sampling is, over all workers.

    Rate and time left count what is generated now, from the moment the first engine begins.
    """

    def __init__(self, ctx: StageContext, num_total: int, num_reused: int) -> None:
        self.ctx = ctx
        self.num_total = num_total
        self.num_reused = num_reused
        self.num_made = 0
        """Completions of the shards finished since."""
        self.tokens_made = 0
        self.began: float | None = None
        self.told_at = 0.0
        self.underway: dict[int, tuple[int, int]] = {}
        """By worker, finished completions and tokens of the shard it is at."""

    def tell(self, worker: int, num_done: int, num_tokens: int) -> None:
        """A worker has finished so much of the shard it is at."""
        now = time.monotonic()
        if self.began is None:
            self.began = now
        self.underway[worker] = (num_done, num_tokens)
        if now - self.told_at >= PROGRESS_SECONDS:
            self._tell(now)

    def finish(self, worker: int, num_completions: int, num_tokens: int) -> None:
        """A worker is done with a shard; without tokens if another process made it."""
        self.underway.pop(worker, None)
        self.tokens_made += num_tokens
        if num_tokens:
            self.num_made += num_completions
        else:
            self.num_reused += num_completions
        self._tell(time.monotonic())

    def drop(self, worker: int) -> None:
        """A worker has died: the shard it was at counts for nothing."""
        self.underway.pop(worker, None)

    def seconds(self) -> float:
        """Time since the first engine began; 0 while none has."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def _tell(self, now: float) -> None:
        self.told_at = now
        elapsed = max(self.seconds(), 1e-9)
        made = self.num_made + sum(done for done, _ in self.underway.values())
        tokens = self.tokens_made + sum(tokens for _, tokens in self.underway.values())
        done = self.num_reused + made
        note = ""
        if made:
            left = elapsed * (self.num_total - done) / made
            note = f"{tokens / elapsed:,.0f} tok/s, {duration(left, rough=True)} left"
        self.ctx.progress(done, self.num_total, "completions", note)
