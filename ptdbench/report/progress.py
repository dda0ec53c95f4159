"""The file that tells how a run is doing to who watches from another machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ptdbench.records import schema
from ptdbench.records.files import read_bytes, write_json

PROGRESS = "progress.json"

_SECONDS = 10.0  # for people who watch a job of a cluster; more often, it shows in make overhead


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
        """Write it if it is due.

        Args:
            step: Steps that are done.
            steps: All of them.
            per_second: Tokens or samples.
            now: The time, in seconds by a clock that never goes back.
        """
        if now < self._next and step < steps:
            return
        self._next = now + _SECONDS
        known = {"step": step, "steps": steps, "unit": self._unit, "per_second": per_second}
        with suppress(OSError):  # a run does not fail because its progress cannot be written
            write_json(self._path, known, durable=False)


def read_progress(directory: Path) -> dict[str, Any] | None:
    """What ``progress.json`` says; ``None`` before the first time, and where it is damaged."""
    try:
        return schema.parse(read_bytes(directory / PROGRESS), schema.Progress)
    except (OSError, ValueError):
        return None
