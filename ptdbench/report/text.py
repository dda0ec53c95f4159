"""Tables, differences and figures as plain text, for terminals and files."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Generic, TypeVar

from rich.cells import cell_len, chop_cells, set_cell_size

from ptdbench.terminal import plain

#: Spaces between two columns of a table.
_GAP = 2

#: A part of a difference is named if it is at least this fraction of it, up to a maximum number of parts.
_NAMED, _MOST_NAMED = 0.1, 5

#: A cell without a figure.
MISSING = "-"

R = TypeVar("R")
F = TypeVar("F")


def figure_text(value: F | None, write: Callable[[F], str] = str) -> str:
    """Format a figure, or :data:`MISSING` for ``None``."""
    return MISSING if value is None else write(value)


def range_text(values: Collection[float], write: Callable[[float], str]) -> str:
    """Format the minimum and maximum: ``1.12 to 1.31``, or ``5`` if they are equal."""
    return " to ".join(dict.fromkeys(write(choose(values)) for choose in (min, max)))


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table, whose rows are all of one type."""

    heading: str  #: Its heading.
    cell: Callable[[R], str]  #: The text for a row, :data:`MISSING` if there is no figure.
    is_text: bool = False  #: Whether it holds text rather than figures.
    #: Columns are omitted in this order if there is no room; ``None``: never omitted.
    drop_order: int | None = None
    #: Width to which it may shrink before others are omitted; 0: its longest word; ``None``: it does not shrink.
    min_width: int | None = None


def drawn(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    words: Collection[str] = (),
    spared: Sequence[str] = (),
) -> str:
    """Return a table as plain text, of at most ``width`` characters unless its figures need more.

    Columns hold figures, except those in ``words``. Where there is no room, headings and cells wrap at spaces, then the
    columns ``spared`` are omitted, in this order, and named below.
    """
    columns = [
        Column(name, itemgetter(place), name in words, spared.index(name) if name in spared else None, min_width=0)
        for place, name in enumerate(headings)
    ]
    lines, gone = table(columns, rows, width)
    return "\n".join([*lines, *left_out(gone, width)])


def table(
    columns: Sequence[Column[R]], rows: Sequence[R], width: int | None, *, folds: bool = True
) -> tuple[list[str], list[str]]:
    """Return the lines of a table, and the headings of the columns that were omitted for lack of room.

    A line has at most ``width`` characters, unless figures need more; ``None``: no limit. A cell that is wider than its
    column is wrapped if ``folds``, else truncated.
    """
    texts = [[column.heading, *(plain(column.cell(row)) for row in rows)] for column in columns]
    natural = [max(map(cell_len, of_column)) for of_column in texts]
    widths = dict(enumerate(natural))
    order = sorted((column.drop_order, place) for place, column in enumerate(columns) if column.drop_order is not None)
    if width is not None:
        shrinking = [place for place, column in enumerate(columns) if column.min_width is not None]
        for place in shrinking:
            longest_word = max(cell_len(word) for text in texts[place] for word in text.split() or [""])
            widths[place] = min(natural[place], columns[place].min_width or longest_word)
        for _, place in order:
            if _total(widths) > width:
                del widths[place]
        for place in shrinking:
            if place in widths:
                widths[place] += min(natural[place] - widths[place], max(0, width - _total(widths)))
    shown = [(texts[place], size, columns[place].is_text) for place, size in widths.items()]
    gone = [column.heading for place, column in enumerate(columns) if place not in widths]
    return _lines(shown, _total(widths), folds), gone


def _lines(columns: Sequence[tuple[Sequence[str], int, bool]], total: int, folds: bool) -> list[str]:
    """Return headings, a rule and the rows; ``columns``: cells, width, and whether the column has words."""
    lines = []
    for number, row in enumerate(zip(*(texts for texts, _, _ in columns), strict=True)):
        fit = _folded if folds else lambda cell, size: [cropped(cell, size)]
        cells = [fit(cell, size) for cell, (_, size, _) in zip(row, columns, strict=True)]
        if number == 0:  # headings stand on the rule
            cells = [[""] * (max(map(len, cells)) - len(parts)) + parts for parts in cells]
        for parts in zip_longest(*cells, fillvalue=""):
            spaces = [" " * (size - cell_len(part)) for part, (_, size, _) in zip(parts, columns, strict=True)]
            shown = zip(parts, spaces, columns, strict=True)
            padded = (part + space if words else space + part for part, space, (_, _, words) in shown)
            lines.append((" " * _GAP).join(padded).rstrip())
        if number == 0:
            lines.append("─" * total)
    return lines


def cropped(line: str, width: int | None) -> str:
    """Truncate a line to a width."""
    return line if width is None or cell_len(line) <= width else set_cell_size(line, max(width - 1, 0)) + "…"


def wrap(text: str, width: int | None, indent: str = "  ") -> str:
    """Wrap a text to ``width`` columns, indenting all lines but the first; words, such as paths, are not broken."""
    return text if width is None else "\n".join(_in_lines(re.split("[ \n]", text), width, indent))


def left_out(headings: Sequence[str], width: int | None) -> list[str]:
    """Return a line that names the omitted columns, if there are any."""
    return [wrap(f"left out in {width} columns: {', '.join(headings)}", width)] if headings else []


def _folded(cell: str, size: int) -> list[str]:
    if cell_len(cell) <= size:
        return [cell]
    return _in_lines([part for word in cell.split() for part in chop_cells(word, size)], size)


def _in_lines(words: Iterable[str], width: int, indent: str = "") -> list[str]:
    """Join words into lines of at most ``width`` columns; a wide character (CJK) takes two."""
    lines: list[str] = []
    for word in words:
        if lines and cell_len(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}{word}" if lines else word)
    return lines


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def difference(
    called: str, reference: str, unit: str, parts: Mapping[str, float], notes: Mapping[str, str], digits: int
) -> str:
    """Return a difference and its largest parts, which add up as printed.

    ``fsdp +44 ms vs ddp: exposed all-gather +37 (64.0 MB, 1.60 GB/s), optimizer +9, rest -2``. Notes on parts are in
    parentheses; ``digits`` is the number of significant digits of the difference.
    """
    total = sum(parts.values())
    places = decimals(total, digits)
    ordered = sorted(parts, key=lambda name: -abs(parts[name]))
    named = [name for name in ordered if abs(parts[name]) >= _NAMED * abs(total)][:_MOST_NAMED]
    rest = round(total, places) - sum(round(parts[name], places) for name in named)
    shown = [(name, parts[name]) for name in named] + [("rest", rest)] * bool(round(rest, places))
    noted = {name: f" ({note})" for name, note in notes.items() if note}
    texts = [f"{name} {value:+,.{places}f}{noted.get(name, '')}" for name, value in shown]
    return f"{called} {total:+,.{places}f} {unit} vs {reference}: {', '.join(texts)}"


def decimals(value: float, digits: int) -> int:
    """Return the number of decimals that shows a figure with at least ``digits`` significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value) or 1.0)))
