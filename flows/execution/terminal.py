"""What a person sees of a run in the terminal, one line per stage, and Ctrl-C there.

On a terminal the running stage's line moves (progress, rate, remaining time); elsewhere, in a log
file for instance, lines are plain and progress is told every `PLAIN_SECONDS`.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

PLAIN_SECONDS = 30.0
KEY_DIGITS = 8


def duration(seconds: float) -> str:
    """A span of time for people: '12.3 s', '4 min 05 s', '2 h 10 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def figure(value: float) -> str:
    """A number for people: whole numbers as they are, others to three significant digits."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.3g}"


@dataclass
class Progress:
    """How far a stage is and how fast it goes."""

    done: int = 0
    total: int = 0
    unit: str = ""
    note: str = ""
    _first: tuple[float, int] | None = field(default=None, repr=False)
    _rate: float | None = field(default=None, repr=False)

    def update(self, event: dict[str, Any], now: float) -> None:
        """Take in a progress event that came at `now` (monotonic seconds)."""
        self.done, self.total = event["done"], event["total"]
        self.unit, self.note = event["unit"], event["note"]
        # A resumed stage starts with work done before: only what is new tells the rate.
        if self._first is None or self.done < self._first[1]:
            self._first = (now, self.done)
        since, start = self._first
        self._rate = (self.done - start) / (now - since) if now > since else None

    def text(self) -> str:
        """One line: '120/400 questions · 35/s · 8.0 s left · note'."""
        parts = [f"{self.done:,}/{self.total:,} {self.unit}".rstrip()]
        if self._rate:
            per = f"{figure(self._rate)}/s" if self._rate >= 0.1 else f"{1 / self._rate:.0f} s each"
            parts.append(per)
            if self.done < self.total and "left" not in self.note:  # the stage may know better
                parts.append(f"{duration((self.total - self.done) / self._rate)} left")
        if self.note:
            parts.append(self.note)
        return " · ".join(parts)


class Display:
    """Prints a run as it goes."""

    def __init__(self, names: list[str], console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._width = max(map(len, names), default=0)
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._progress = Progress()
        self._told = 0.0
        self._name = ""

    def line(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, soft_wrap=True)

    def begin(self, name: str) -> None:
        """A stage starts."""
        self._name = name
        self._progress = Progress()
        self._told = time.monotonic()
        if self._console.is_terminal:
            self._spinner = Spinner("dots", self._label(""))
            self._live = Live(self._spinner, console=self._console, transient=True)
            self._live.start()

    def update(self, event: dict[str, Any]) -> None:
        """An event of the running stage."""
        if event["event"] == "progress":
            self._progress.update(event, time.monotonic())
            self._show(self._progress.text(), seldom=True)
        else:
            self._show(event["message"], seldom=False)
            if self._live is not None and event["event"] == "log":
                self._live.console.print(self._label(f"[dim]{escape(event['message'])}[/]"))

    def end(self, state: str, key: str, detail: str) -> None:
        """The running stage ended as `state`; `detail` says more."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        colour = {"done": "green", "reused": "cyan"}.get(state, "red")
        short = key[:KEY_DIGITS]
        self.line(self._label(f"[{colour}]{state:<8}[/] [dim]{short}[/]  {escape(detail)}"))

    def _label(self, text: str) -> str:
        return f"{self._name:<{self._width}}  {text}"

    def _show(self, text: str, seldom: bool) -> None:
        if self._live is not None:
            self._spinner.update(text=self._label(escape(text)))
            return
        now = time.monotonic()
        if not seldom or now - self._told >= PLAIN_SECONDS:
            self._told = now
            self.line(self._label(escape(text)))


@contextmanager
def at_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Have the first Ctrl-C do `act`; a second one breaks off at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
