"""Why a run did not end well, as it stands below a table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

#: Stands in a message before the path of what the run's processes wrote.
OUTPUT = "; its output is in "

#: Characters of a message proper that are shown; the record has all of it.
_LIMIT = 1000


def reason(record: Mapping[str, Any]) -> str:
    """Status, rank and error in one line: ``failed on rank 1: RuntimeError: ...``.

    A long message is cut, but never the path behind :data:`OUTPUT`.
    """
    error = record.get("error") or {}
    rank = error.get("rank")  # negative: the process that starts the ranks
    where = f" on rank {rank}" if rank is not None and rank >= 0 else ""
    message, *output = (error.get("message") or "").split(OUTPUT)
    text = ": ".join(filter(None, (error.get("type"), _cut(message))))
    return OUTPUT.join([f"{record['status']}{where}: {text or 'no reason on record'}", *output])


def wrap(text: str, width: int | None) -> str:
    """The text in lines of at most ``width`` columns, all but the first indented; words, such as a path, stay whole."""
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _cut(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LIMIT else f"{line[:_LIMIT].rstrip()} ..."
