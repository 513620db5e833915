"""How far sampling is, for the person who watches the run."""

from __future__ import annotations

import time
from collections.abc import Callable

from tasks.context import StageContext

PROGRESS_SECONDS = 1.0


class Progress:
    """Tells the run how far sampling is: rate and time left count what is generated now only."""

    def __init__(self, ctx: StageContext, num_total: int, num_reused: int) -> None:
        self.ctx = ctx
        self.num_total = num_total
        self.num_reused = self.num_before = num_reused
        self.tokens_before = 0
        self.seconds = 0.0
        self.told_at = 0.0

    def watch(self) -> Callable[[int, int], None]:
        """The callback for one call of `generate`, which starts now."""
        started = time.monotonic()

        def tell(num_done: int, num_tokens: int) -> None:
            now = time.monotonic()
            if now - self.told_at >= PROGRESS_SECONDS:
                self.told_at = now
                self._tell(num_done, num_tokens, now - started)

        return tell

    def add(self, num_completions: int, num_tokens: int, seconds: float) -> None:
        """A shard is finished."""
        self.num_before += num_completions
        self.tokens_before += num_tokens
        self.seconds += seconds
        self._tell(0, 0, 0.0)

    def _tell(self, num_done: int, num_tokens: int, seconds: float) -> None:
        done = self.num_before + num_done
        elapsed = max(self.seconds + seconds, 1e-9)
        rate = (self.tokens_before + num_tokens) / elapsed
        made = done - self.num_reused
        left = elapsed * (self.num_total - done) / made if made else 0.0
        note = f"{rate:,.0f} tok/s, {time_words(left)} left"
        self.ctx.progress(done, self.num_total, "completions", note)


def time_words(seconds: float) -> str:
    """A duration for people: '42 s', '3 min 5 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
