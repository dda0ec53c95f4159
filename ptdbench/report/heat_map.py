"""The image of ``workload=p2p``: from whom to whom messages are slow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from ptdbench.report.text import size_text

#: Up to so many ranks each cell also shows its number.
_LEGIBLE = 16


def draw(p2p: Mapping[str, Any], ranks: int) -> bytes:
    """Bandwidth and latency of every ordered pair as two matrices of colors; a PNG.

    Args:
        p2p: The ``p2p`` of a record.
        ranks: How many ranks there are.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and leaves pyplot's own state alone
    left, right = figure.subplots(1, 2)
    _panel(left, p2p, "bandwidth", 1e-9, ranks, f"bandwidth at {_largest(p2p)}, GB/s", "viridis")
    _panel(right, p2p, "latency", 1e6, ranks, "latency, µs", "viridis_r")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def cells(p2p: Mapping[str, Any], name: str, ranks: int) -> np.ndarray:
    """A figure of all ordered pairs, rows by source and columns by target; NaN where there is none."""
    found = np.full((ranks, ranks), np.nan)
    for pair in p2p["pairs"]:
        if pair[name] is not None:
            found[pair["source"], pair["target"]] = pair[name]
    return found


def _largest(p2p: Mapping[str, Any]) -> str:
    sizes = {pair["sizes"][-1]["bytes"] for pair in p2p["pairs"] if pair["sizes"]}
    return " to ".join(size_text(size) for size in sorted({min(sizes), max(sizes)})) if sizes else "no size"


def _panel(axes: Any, p2p: Mapping[str, Any], name: str, scale: float, ranks: int, title: str, colors: str) -> None:
    """One matrix; in both of them a dark cell is a slow pair."""
    values = cells(p2p, name, ranks) * scale
    image = axes.imshow(values, cmap=colors)
    axes.figure.colorbar(image, ax=axes)
    axes.set(title=title, xlabel="to rank", ylabel="from rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if ranks <= _LEGIBLE:
        middle = np.nanmean([np.nanmin(values), np.nanmax(values)]) if np.isfinite(values).any() else 0
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = value < middle if name == "bandwidth" else value > middle
                text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black")
