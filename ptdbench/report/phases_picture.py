"""Where the time of a step went, as an image: the phases of each rank end to end."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ptdbench.report.phases import COLORS, PHASES, of_rank, shown_ranks
from ptdbench.report.text import three_digits

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

#: Phases whose color is too dark for black figures.
_DARK = ("backward", "communication", "optimizer")

#: The image in pixels: its width, the heights of its parts, a bar in its row, and the gap beside texts.
_WIDTH, _TITLE, _ROW, _AXIS, _LEGEND, _BAR, _GAP = 1100, 50, 44, 70, 70, 34, 12


def draw(phases: Mapping[str, Any]) -> bytes:
    """A bar for the mean over ranks and one a rank, of many ranks only the slowest and the fastest; a PNG.

    Not by matplotlib, which takes half a second or more, in each run.

    Args:
        phases: The ``phases`` of a record, with at least one profiled step.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = bars(phases)
    image = Image.new("RGB", (_WIDTH, _TITLE + _ROW * len(rows) + _AXIS + _LEGEND), "white")
    pen = ImageDraw.Draw(image)
    pen.font = ImageFont.load_default(size=15)
    left = max(map(pen.textlength, rows)) + 2 * _GAP
    scale = (_WIDTH - 2 * _GAP - left) / (max(sum(row) for row in rows.values()) or 1.0)
    title = f"where the time of a step went, from {phases['steps']} profiled steps"
    pen.text((_WIDTH / 2, _TITLE / 2), title, "black", anchor="mm")
    for place, (name, row) in enumerate(rows.items()):
        _draw_bar(pen, name, row, (left, _TITLE + _ROW * place), scale)
    bottom = _TITLE + _ROW * len(rows)
    _draw_axis(pen, left, bottom, scale)
    for place, (phase, text) in enumerate(PHASES.items()):
        x, y = _GAP + (_WIDTH - _GAP) // 4 * (place // 2), bottom + _AXIS + _LEGEND // 3 * (place % 2)
        pen.rectangle((x, y, x + 24, y + 14), COLORS[phase])
        pen.text((x + 24 + _GAP, y + 7), text, "black", anchor="lm")
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()


def _draw_bar(pen: ImageDraw, name: str, row: Sequence[float], corner: tuple[float, float], scale: float) -> None:
    """The phases of one row end to end, each with its milliseconds where there is room for them."""
    x, y = corner
    middle = y + _ROW / 2
    pen.text((x - _GAP, middle), name, "black", anchor="rm")
    for phase, length in zip(PHASES, row, strict=True):
        end = x + scale * max(length, 0.0)
        if end - x >= 1:
            pen.rectangle((x, middle - _BAR / 2, end - 1, middle + _BAR / 2), COLORS[phase])
        if pen.textlength(text := three_digits(length)) + _GAP < end - x:
            pen.text(((x + end) / 2, middle), text, "white" if phase in _DARK else "black", anchor="mm")
        x = end


def _draw_axis(pen: ImageDraw, left: float, top: float, scale: float) -> None:
    """A scale of milliseconds with some ten marks at round numbers."""
    length = (_WIDTH - 2 * _GAP - left) / scale
    power = 10 ** math.floor(math.log10(length))
    distance = next(power * part for part in (0.1, 0.2, 0.5, 1) if length / (power * part) <= 12)
    pen.line((left, top, _WIDTH - 2 * _GAP, top), "black")
    for number in range(int(length / distance) + 1):
        x = left + scale * distance * number
        pen.line((x, top, x, top + 6), "black")
        pen.text((x, top + _GAP), f"{distance * number:,.6g}", "black", anchor="ma")
    pen.text(((left + _WIDTH) / 2, top + _AXIS / 2), "ms of a timed step", "black", anchor="ma")


def bars(phases: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of each phase, for each bar by its title."""
    ranks = [of_rank(phases, rank) for rank in range(len(phases["ranks"]["forward"]))]
    rows = {"mean": [sum(column) / len(ranks) for column in zip(*ranks, strict=True)]} if len(ranks) > 1 else {}
    rows |= {title: ranks[rank] for title, rank in shown_ranks(phases).items()}
    return {title: [1e3 * seconds for seconds in row] for title, row in rows.items()}
