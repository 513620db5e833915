"""Figures as words."""

from __future__ import annotations

import pytest

from ratchet.words import count, duration, p_value, percent, small


def test_words() -> None:
    assert [percent(0.3141), percent(0.5, 0)] == ["31.4%", "50%"]
    assert [count(12345), count(2_500_000), count(3.1e9)] == [
        "12,345",
        "2.50 million",
        "3.10 billion",
    ]
    assert [p_value(0.0432), p_value(1e-9)] == ["0.043", "< 0.0001"]
    assert [small(3.14e-6), small(0.0123), small(0.0)] == ["3.1×10⁻⁶", "0.0123", "0"]


@pytest.mark.parametrize(
    ("seconds", "text", "rough"),
    [
        (0.04, "0.0 s", "0 s"),
        (4.24, "4.2 s", "4 s"),
        (59.4, "59.4 s", "59 s"),
        (59.94, "59.9 s", "60 s"),
        (60, "1 min 00 s", "60 s"),
        (89, "1 min 29 s", "89 s"),
        (185, "3 min 05 s", "3 min"),
        (245, "4 min 05 s", "4 min"),
        (600, "10 min 00 s", "10 min"),
        (7800, "2 h 10 min", "2 h 10 min"),
    ],
)
def test_duration(seconds: float, text: str, rough: str) -> None:
    assert duration(seconds) == text
    assert duration(seconds, rough=True) == rough
