"""What a report of several sweeps compares, and how each of its runs is typed again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdbench.records import alternatives
from ptdbench.records.alternatives import Alternative
from ptdbench.records.bearing import bears
from ptdbench.records.load import Run
from ptdbench.records.record import how_started


def alternatives_of(runs: Sequence[Run]) -> list[Alternative]:
    """Those of each sweep, and of each side of a comparison, by itself: later, or there, it may be another program.

    Args:
        runs: Runs that train; their fields ``directory`` say where they are now.
    """
    sweeps: dict[Path, list[Run]] = {}
    for run in runs:
        sweeps.setdefault(alternatives.sweep_of(run), []).append(run)
    return [one for sweep in sweeps.values() for one in alternatives.group(sweep)]


def command(record: Mapping[str, Any]) -> str | None:
    """What to type for one such run; ``None`` where its overrides are not on record."""
    if record.get("overrides") is None:
        return None
    words = [word for word in record["overrides"] if not bears(word.lstrip("+").partition("=")[0], "start")]
    return f"{how_started(record)} {shlex.join(words)}".rstrip()
