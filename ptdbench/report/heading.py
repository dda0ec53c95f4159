"""What a run is called in its display."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """What a run is called in its display.

    Attributes:
        title: What it is, in a few words; in a sweep those that tell it from the others.
        number: Its number in the sweep, from 1; ``None`` outside of one.
        total: How many runs the sweep has; ``None`` where nobody knows yet.
        later_seconds: Estimated duration of the runs after it; ``None`` if there are none, or none has ended yet.
    """

    title: str
    number: int | None = None
    total: int | None = None
    later_seconds: float | None = None

    def __str__(self) -> str:
        """``[2/8] gpt_tiny pdp gpipe b16``."""
        if self.number is None:
            return self.title
        return f"[{self.number}{f'/{self.total}' if self.total else ''}] {self.title}"
