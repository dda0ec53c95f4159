"""Tables, differences and figures as plain text, for terminals and files alike."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ptdbench.terminal import echo, plain

#: Columns between two of a table.
_GAP = 2

#: A part of a difference is named from this share of it on, the largest ones only.
_NAMED, _MOST_NAMED = 0.1, 5


Rows = Sequence[Sequence[str]]


def drawn(
    headings: Sequence[str], rows: Rows, width: int, words: Collection[str] = (), folding: str | None = None
) -> str:
    """Return a table as plain text, at least as wide as its figures need, and else ``width`` columns.

    Columns hold figures, but for those of ``words``, and for the one ``folding`` at the spaces of its words.
    """
    widths = fitted(headings, rows, width, {folding: longest_word(headings, rows, folding)} if folding else {})
    return "\n".join(lines(headings, rows, widths, {*words, folding}))


def longest_word(headings: Sequence[str], rows: Rows, folding: str) -> int:
    """To how much the column that folds may shrink."""
    place = headings.index(folding)
    return max(cell_len(word) for cells in (headings, *rows) for word in cells[place].split() or [""])


def fitted(
    headings: Sequence[str], rows: Rows, width: int | None, least: Mapping[str, int], spared: Collection[str] = ()
) -> dict[str, int]:
    """Return the widths of the columns for which there is room in ``width``, any number where it is ``None``.

    Those of ``least`` may shrink to so much; where that does not help, those ``spared`` are left out, the first first.
    """
    columns = zip(headings, *rows, strict=True)
    natural = {name: max(map(cell_len, column)) for name, column in zip(headings, columns, strict=True)}
    if width is None:
        return natural
    widths = {name: min(size, least.get(name, size)) for name, size in natural.items()}
    for name in spared:
        if _total(widths) > width:
            widths.pop(name, None)
    for name in least:
        widths[name] += min(natural[name] - widths[name], max(0, width - _total(widths)))
    return widths


def lines(
    headings: Sequence[str], rows: Rows, widths: Mapping[str, int], words: Collection[str | None], *, folds: bool = True
) -> list[str]:
    """Headings, a rule and the rows; cells that are wider than their column are folded, or cut."""
    kept = [(place, name) for place, name in enumerate(headings) if name in widths]
    fit = _folded if folds else lambda cell, size: [cropped(cell, size)]
    found = []
    for row in (headings, *rows):
        cells = [fit(row[place], widths[name]) for place, name in kept]
        if row is headings:  # they stand on the rule
            cells = [[""] * (max(map(len, cells)) - len(parts)) + parts for parts in cells]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (_padded(part, widths[name], name in words) for part, (_, name) in zip(parts, kept, strict=True))
            found.append((" " * _GAP).join(padded).rstrip())
        if row is headings:
            found.append(("─" if folds else "-") * _total(widths))
    return found


def cropped(line: str, width: int | None) -> str:
    """The line, cut to a width."""
    return line if width is None or cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def wrap(text: str, width: int | None) -> str:
    """The text in lines of at most ``width`` columns, all but the first indented; words, such as a path, stay whole."""
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _folded(cell: str, size: int) -> list[str]:
    return [cell] if cell_len(cell) <= size else textwrap.wrap(cell, size, break_on_hyphens=False)


def _padded(part: str, size: int, is_words: bool) -> str:
    padding = " " * (size - cell_len(part))
    return part + padding if is_words else padding + part


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def emphasized(text: str) -> Text:
    """The text of tables for a terminal: bold headings, the fastest run in green, and what did not end well in red."""
    shown = Text(plain(text))
    shown.highlight_regex(r"(?m)^.* · .*$|^ *#  .*$", "bold")
    shown.highlight_regex(r"(?m)^ *1  .*$", "green")
    shown.highlight_regex(r"(?m)^ *-  .*$", "red")
    return shown


def show(text: str) -> None:
    """Print tables: with :func:`emphasized` on a terminal, as far as it has bold and colors, and else as they are."""
    console = Console(highlight=False)
    if console.is_terminal and sys.stdout and console.encoding.startswith("utf"):
        console.print(emphasized(text), soft_wrap=True)
    else:
        echo(text)


def difference(
    called: str, reference: str, unit: str, parts: Mapping[str, float], notes: Mapping[str, str], digits: int
) -> str:
    """Return a difference and its largest parts, which add up as printed.

    ``fsdp +44 ms vs ddp: exposed all-gather +37 (64.0 MB, 1.60 GB/s), optimizer +9, rest -2``. Notes on parts stand in
    parentheses; ``digits`` are the significant ones of the difference.
    """
    total = sum(parts.values())
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(total) or 1.0)))
    ordered = sorted(parts, key=lambda name: -abs(parts[name]))
    named = [name for name in ordered if abs(parts[name]) >= _NAMED * abs(total)][:_MOST_NAMED]
    rest = round(total, decimals) - sum(round(parts[name], decimals) for name in named)
    shown = [(name, parts[name]) for name in named] + [("rest", rest)] * bool(round(rest, decimals))
    said = [
        f"{name} {value:+,.{decimals}f}" + (f" ({notes[name]})" if notes.get(name) else "") for name, value in shown
    ]
    return f"{called} {total:+,.{decimals}f} {unit} vs {reference}: {', '.join(said)}"
