"""Figures as text: three digits and a unit."""

from __future__ import annotations


def three_digits(value: float) -> str:
    """Three significant digits, all digits before the point kept: ``12,346``, ``12.3``, ``0.123``."""
    size = abs(value)
    if 0 < size < 0.09995:
        return f"{value:.3g}"
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 or size == 0 else 3
    return f"{value:,.{decimals}f}"


def flops_text(flops_per_second: float) -> str:
    """``3.01e10`` FLOP/s become ``30.1 GFLOP/s``."""
    unit, name = (1e12, "TFLOP/s") if flops_per_second >= 1e12 else (1e9, "GFLOP/s")
    return f"{three_digits(flops_per_second / unit)} {name}"


def size_text(size: int) -> str:
    """``1536`` bytes become ``1.5 KiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Three digits and a unit: ``0.00123`` becomes ``1.23 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"
