"""Formatting of figures: digits and a unit."""

import math
import re


def three_digits(value: float) -> str:
    """Format with three significant digits, but all digits before the point: ``12,346``, ``12.3``, ``0.123``."""
    size = abs(value)
    if 0 < size < 0.09995:
        return f"{value:.3g}"
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 or size == 0 else 3
    return f"{value:,.{decimals}f}"


def flops_text(flops_per_second: float) -> str:
    """Format FLOP/s: ``3.01e10`` becomes ``30.1 GFLOP/s``."""
    unit, name = (1e12, "TFLOP/s") if flops_per_second >= 1e12 else (1e9, "GFLOP/s")
    return f"{three_digits(flops_per_second / unit)} {name}"


def size_text(size: int) -> str:
    """Format bytes in binary units: ``1536`` becomes ``1.5 KiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size} B"


def memory_text(size: int) -> str:
    """Format bytes of memory in GiB, below 1 GiB in MiB: ``1288490188`` becomes ``1.2 GiB``."""
    return f"{size / 2**30:,.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.0f} MiB"


def bytes_text(size: float) -> str:
    """Format bytes sent, in decimal units: ``49e6`` becomes ``49.0 MB``."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    unit, name = next(((unit, name) for unit, name in units if size >= unit), (1.0, "B"))
    return f"{three_digits(size / unit)} {name}"


def time_text(seconds: float) -> str:
    """Format seconds as three digits and a unit: ``0.00123`` becomes ``1.23 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def span_text(seconds: float) -> str:
    """Format seconds roughly: ``0.81 s``, ``12 s``, ``3 min``."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def duration_text(seconds: float) -> str:
    """Format seconds as a clock does: ``75`` becomes ``1:15``, and ``3675`` becomes ``1:01:15``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


#: Bytes by unit, decimal and binary.
_UNITS = {
    **{f"{letter}B": 1000**power for power, letter in enumerate(("", "k", "M", "G", "T"))},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def size_of(text: str) -> int:
    """Parse bytes with a unit, ``20GiB`` or ``1.5 TB``; raises ValueError for anything else, a bare number included."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w+)", text.strip())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text} is not a size")
    return round(float(match[1]) * _UNITS[match[2]])
