"""What a person reads in the terminal while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.execution.terminal import Display, Progress, duration, figure


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 00 s"),
        (245, "4 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (7473, "7,473"), (2.0, "2"), (0.41666, "0.417"), (1e-7, "1e-07")]
)
def test_figure(value: float, text: str) -> None:
    assert figure(value) == text


def event(done: int, note: str = "") -> dict:
    return {"event": "progress", "done": done, "total": 400, "unit": "questions", "note": note}


def test_rate_counts_only_what_was_done_while_we_watched() -> None:
    progress = Progress()
    progress.update(event(100), now=10.0)
    assert progress.text() == "100/400 questions"
    progress.update(event(200, "loss 0.3"), now=14.0)
    # 100 questions in 4 s; the other 200 take 8 s.
    assert progress.text() == "200/400 questions · 25/s · 8.0 s left · loss 0.3"


def test_a_stage_that_tells_the_time_left_is_believed() -> None:
    progress = Progress()
    progress.update(event(100), now=10.0)
    progress.update(event(200, "5 s left"), now=14.0)
    assert progress.text() == "200/400 questions · 25/s · 5 s left"


def test_slow_progress_says_seconds_each() -> None:
    progress = Progress()
    progress.update(event(0), now=0.0)
    progress.update(event(2), now=60.0)
    assert progress.text() == "2/400 questions · 30 s each · 3 h 19 min left"


def test_a_new_phase_starts_the_rate_anew() -> None:
    progress = Progress()
    progress.update(event(400), now=0.0)
    progress.update(event(10), now=1.0)
    progress.update(event(20), now=2.0)
    assert progress.text() == "20/400 questions · 10/s · 38.0 s left"


def test_plain_output_is_one_line_per_stage_and_keeps_brackets() -> None:
    out = io.StringIO()
    display = Display(["model", "evaluate.rl"], Console(file=out, width=60, highlight=False))
    display.begin("model")
    display.update(event(3))  # too soon to be told
    display.update({"event": "log", "message": "loaded [fp32]"})
    display.end("done", "0123456789abcdef0123", "12.3 s  " + "x" * 60 + " [end]")
    assert out.getvalue().splitlines() == [
        "model        loaded [fp32]",
        "model        done     01234567  12.3 s  " + "x" * 60 + " [end]",
    ]


def test_on_a_terminal_only_the_last_word_stays() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=80)
    display = Display(["model"], console)
    display.begin("model")
    display.update(event(3))
    display.end("reused", "0123456789abcdef0123", "rows 9")
    assert out.getvalue().splitlines()[-1].endswith("model  reused   01234567  rows 9")
