"""Tables as plain text, for terminals and files alike."""

from __future__ import annotations

import io

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table


def as_text(table: Table, width: int, foldable: int | None = None) -> str:
    """The table as plain text, at least as wide as its figures need.

    Args:
        table: What to show.
        width: Columns to fit into, as far as the foldable column allows.
        foldable: The one column that may fold, at its spaces; ``None`` for none.
    """
    console = Console(file=io.StringIO(), width=10_000, color_system=None, markup=False, emoji=False)
    natural = Measurement.get(console, console.options, table).maximum
    console.width = min(natural, max(width, natural - (_slack(table.columns[foldable]) if foldable else 0)))
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _slack(column: Column) -> int:
    """By how much a column can shrink before a word of it would be cut."""
    texts = [str(column.header), *map(str, column.cells)]
    return max(map(len, texts)) - max(len(word) for text in texts for word in text.split())
