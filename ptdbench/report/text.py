"""Tables, differences and figures as plain text, for terminals and files alike."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Collection, Mapping
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from ptdbench.terminal import plain, say

#: A part of a difference is named from this share of it on, the largest ones only.
_NAMED, _MOST_NAMED = 0.1, 5


def empty_table(*headings: str, words: Collection[str] = (), folding: str | None = None) -> Table:
    """A table without rows.

    Args:
        headings: Of the columns, which hold figures,
        words: except for these,
        folding: and this one, whose words may fold at their spaces.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "left" if heading in words or heading == folding else "right"
        table.add_column(heading, justify=justify, no_wrap=heading != folding)
    return table


def as_text(table: Table, width: int) -> str:
    """The table as plain text, at least as wide as its figures need, and else ``width`` columns."""
    console = Console(file=io.StringIO(), width=10_000, color_system=None, markup=False, emoji=False)
    natural = Measurement.get(console, console.options, table).maximum
    console.width = min(
        natural, max(width, natural - sum(_slack(column) for column in table.columns if not column.no_wrap))
    )
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


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
        say(text)


def difference(
    called: str, reference: str, unit: str, parts: Mapping[str, float], notes: Mapping[str, str], digits: int
) -> str:
    """Return a difference and its largest parts, which add up as printed.

    ``fsdp +44 ms vs ddp: exposed all-gather +37 (64.0 MB, 1.60 GB/s), optimizer +9, rest -2``.

    Args:
        called: What is larger, or smaller.
        reference: What it is compared with.
        unit: The unit of the parts.
        parts: All parts of the difference.
        notes: Figures of some parts, shown in parentheses.
        digits: Significant digits of the difference.
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


def _slack(column: Column) -> int:
    """By how much a column can shrink before a word of it would be cut."""
    texts = [str(column.header), *map(str, column.cells)]
    return max(map(len, texts)) - max(len(word) for text in texts for word in text.split())
