"""Seconds from one milestone of a run to the next."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds from one milestone to the next.

    Attributes:
        laps: Seconds by milestone.

    Args:
        started: Start time in seconds since the epoch, possibly taken in another process.
    """

    def __init__(self, started: float) -> None:
        self.laps: dict[str, float] = {}
        self._started = self._last = started

    def lap(self, name: str, now: float | None = None) -> None:
        """Record the time since the last lap under ``name``; it ended ``now``."""
        now = time.time() if now is None else now
        self.laps[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._started
