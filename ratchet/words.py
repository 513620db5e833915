"""Figures as words: one way to write a share, a difference, a duration, a p-value."""

from __future__ import annotations

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(share: float, decimals: int = 1) -> str:
    """0.314 as '31.4%'."""
    return f"{100 * share:.{decimals}f}%"


def count(value: float) -> str:
    """12345 as '12,345'; millions and above in short."""
    if value >= 1e9:
        return f"{value / 1e9:.2f} billion"
    return f"{value / 1e6:.2f} million" if value >= 1e6 else f"{value:,.0f}"


def points(value: float) -> str:
    """A difference of shares in percentage points, signed (with a true minus)."""
    return f"{round(100 * value, 1) + 0.0:+.1f}".replace("-", "−")


def duration(seconds: float, rough: bool = False) -> str:
    """Seconds as '4.2 s', '3 min 05 s' or '2 h 10 min'; roughly: '4 s', '3 min', '2 h 10 min'."""
    if rough and seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 60:.0f} min" if rough else f"{minutes} min {rest:02d} s"


def p_value(p: float) -> str:
    """A p-value to two figures, never '0'."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def small(value: float) -> str:
    """A small quantity such as a drift: '3.1×10⁻⁶', '0.012', '0'."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}×10{str(int(power)).translate(SUPERSCRIPT)}"


__all__ = ["count", "duration", "p_value", "percent", "points", "small"]
