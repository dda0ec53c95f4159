"""The file that tells how a run is doing to who watches from another machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec import Struct, to_builtins

from ptdbench.files import read_bytes, write_json
from ptdbench.records import schema

PROGRESS = "progress.json"

_SECONDS = 10.0  # for people who watch a job of a cluster; more often, it shows in make overhead


class Progress(Struct, frozen=True):
    """The progress of a running run: ``step`` of ``steps``, and ``unit`` ``per_second``."""

    step: schema.Whole
    steps: schema.Whole
    unit: str
    per_second: float | None


class ProgressFile:
    """``progress.json``, kept up to date: soon after the first steps, every ten seconds and at the end.

    Args:
        directory: The run's directory.
        unit: What throughput counts: ``tokens`` or ``samples``.
    """

    def __init__(self, directory: Path, unit: str) -> None:
        self._path = directory / PROGRESS
        self._unit = unit
        self._next = 0.0

    def write(self, step: int, steps: int, per_second: float | None, now: float) -> None:
        """Write it if it is due; ``now`` is in seconds by a clock that never goes back."""
        if now < self._next and step < steps:
            return
        self._next = now + _SECONDS
        known = to_builtins(Progress(step, steps, self._unit, per_second))
        with suppress(OSError):  # a run does not fail because its progress cannot be written
            write_json(self._path, known, durable=False)


def read_progress(directory: Path) -> Progress | None:
    """Read ``progress.json``; ``None`` before the first time, and where it is damaged."""
    try:
        return schema.read(read_bytes(directory / PROGRESS), Progress)
    except (OSError, ValueError):
        return None
