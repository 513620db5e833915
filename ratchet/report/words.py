"""Figures as words: one way to write a share, a difference, a duration, a p-value."""

from __future__ import annotations

from ratchet.evaluation.verdict import points

VARIANT_NAMES = {"baseline": "baseline", "rl": "after RL"}
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
WARMSTART_NAMES = {"warmstart_sft": "after SFT", "warmstart_opd": "after OPD"}


def percent(share: float, decimals: int = 1) -> str:
    """0.314 as '31.4%'."""
    return f"{100 * share:.{decimals}f}%"


def count(value: float) -> str:
    """12345 as '12,345'; millions and above in short."""
    if value >= 1e9:
        return f"{value / 1e9:.2f} billion"
    return f"{value / 1e6:.2f} million" if value >= 1e6 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as '4.2 s', '3 min 05 s' or '2 h 10 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def p_value(p: float) -> str:
    """A p-value to two figures, never '0'."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def small(value: float) -> str:
    """A small quantity such as a drift: '3.1×10⁻⁶', '0.012', '0'."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}×10{str(int(power)).translate(SUPERSCRIPT)}"


def variant_name(variant: str, warmstart_stage: str | None) -> str:
    """A variant for people: 'baseline', 'after SFT', 'after RL', or its own name."""
    if variant == "warmstart" and warmstart_stage is not None:
        return WARMSTART_NAMES[warmstart_stage]
    return VARIANT_NAMES.get(variant, variant)


__all__ = ["count", "duration", "p_value", "percent", "points", "small", "variant_name"]
