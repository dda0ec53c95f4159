"""Where the time of a step went, as an image: the phases of each rank end to end."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ptdbench.report.phases import PHASES, of_rank, shown_ranks
from ptdbench.report.text import three_digits

#: Computing in blue and green, waiting in warm colors: Okabe and Ito's palette, made for color-blind people too.
_COLORS = {
    "data": "#cc79a7",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "communication": "#d55e00",
    "stragglers": "#e69f00",
    "bubble": "#f0e442",
    "optimizer": "#009e73",
    "other": "#999999",
}

#: Phases whose color is too dark for black figures.
_DARK = ("backward", "communication", "optimizer")

#: A phase of a smaller share of the longest step has no room for its figure.
_LEGIBLE = 0.05


def draw(phases: Mapping[str, Any]) -> bytes:
    """A bar for the mean over ranks and one a rank, of many ranks only the slowest and the fastest; a PNG.

    Args:
        phases: The ``phases`` of a record, with at least one profiled step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = bars(phases)
    figure = Figure(figsize=(10, 2 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and leaves pyplot's own state alone
    axes = figure.subplots()
    longest = max(sum(row) for row in rows.values())
    for place, phase in enumerate(PHASES):
        lengths = [row[place] for row in rows.values()]
        starts = [sum(row[:place]) for row in rows.values()]
        drawn = axes.barh(list(rows), lengths, left=starts, color=_COLORS[phase], edgecolor="white")
        drawn.set_label(PHASES[phase])
        figures = [three_digits(length) if length >= _LEGIBLE * longest else "" for length in lengths]
        axes.bar_label(drawn, figures, label_type="center", color="white" if phase in _DARK else "black")
    axes.set_xlim(0, 1.01 * longest)
    axes.invert_yaxis()  # the mean on top
    axes.set(title=f"where the time of a step went, from {phases['steps']} profiled steps", xlabel="ms of a timed step")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def bars(phases: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of each phase, for each bar by its title."""
    ranks = [of_rank(phases, rank) for rank in range(len(phases["ranks"]["forward"]))]
    rows = {"mean": [sum(column) / len(ranks) for column in zip(*ranks, strict=True)]} if len(ranks) > 1 else {}
    rows |= {title: ranks[rank] for title, rank in shown_ranks(phases).items()}
    return {title: [1e3 * seconds for seconds in row] for title, row in rows.items()}
