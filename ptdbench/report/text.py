"""Tables as plain text, for terminals and files alike."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from ptdbench.terminal import plain, say


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


def _slack(column: Column) -> int:
    """By how much a column can shrink before a word of it would be cut."""
    texts = [str(column.header), *map(str, column.cells)]
    return max(map(len, texts)) - max(len(word) for text in texts for word in text.split())
