"""What a run is called in its display, and what it knows of the sweep around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rest:
    """What the remaining time of a sweep is estimated from: runs take time in proportion to their work.

    Attributes:
        seconds: What the runs took that ended well.
        work: What they did, in FLOPs, or in runs where the FLOPs of one are not known.
        own: The work of the present run.
        waiting: The work of each run after it, and the seconds that its steps may take, if there is a limit.
    """

    seconds: float
    work: float
    own: float
    waiting: Sequence[tuple[float, float | None]]

    def left(self, elapsed: float, own_left: float) -> float:
        """Seconds until the sweep ends.

        Args:
            elapsed: Since the present run began.
            own_left: Until it ends.
        """
        pace = (self.seconds + elapsed + own_left) / (self.work + self.own)
        waits = (pace * work if limit is None else min(pace * work, limit) for work, limit in self.waiting)
        return own_left + sum(waits)


@dataclass(frozen=True)
class Heading:
    """What a run is called in its display.

    Attributes:
        title: What it is, in a few words; in a sweep those that tell it from the others.
        number: Its number in the sweep, from 1; ``None`` outside of one.
        total: How many runs the sweep has; ``None`` where nobody knows yet.
        rest: What the remaining time of the sweep is estimated from; ``None`` if there is nothing more to do.
        flops_per_second: What all ranks together reached in an earlier run of the same model and precision.
    """

    title: str
    number: int | None = None
    total: int | None = None
    rest: Rest | None = None
    flops_per_second: float | None = None

    def __str__(self) -> str:
        """``[2/8] gpt_tiny pdp gpipe b16``."""
        if self.number is None:
            return self.title
        return f"[{self.number}{f'/{self.total}' if self.total else ''}] {self.title}"
