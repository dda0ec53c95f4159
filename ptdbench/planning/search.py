"""Search for the largest micro-batch that fits: a line through earlier tries proposes a size, and a try decides.

A try may be a run on virtual GPUs, or of all ranks in fresh processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ptdbench.records.schema import Try

#: A candidate whose predicted need exceeds the room by more than this fraction clearly does not fit, and is not tried.
_CLEAR = 0.1


@dataclass
class Search:
    """A search for the largest of several micro-batches that fits."""

    candidates: Sequence[int]  #: The micro-batches that the layout can run, in ascending order; at least one.
    room: int  #: Available bytes.
    attempt: Callable[[int], Try]  #: Tries a micro-batch.
    most: int = 12  #: Maximum number of tries; after these, the largest that fitted is the result.
    #: A line proposes at most this multiple of the largest try: on real devices, a try that needs far too much memory
    #: harms other processes. 0: no limit, as needs are exact.
    stride: int = 0
    #: The tries before a line proposes are at most these multiples of the smallest candidate: sizes too close together
    #: give no useful line, and needs may grow more slowly beyond some size.
    points: Sequence[int] = (8,)
    held: Mapping[int, int] = field(default_factory=dict)  #: Bytes of a candidate that do not grow with its size.
    tries: list[Try] = field(default_factory=list)  #: The tries so far, in order.

    def largest(self) -> int | None:
        """Return the largest micro-batch that fits, itself tried; ``None`` if none does.

        Each larger candidate was tried without success, or is excluded by these tries or by :meth:`predicted`.
        """
        while (proposal := self.proposal()) is not None and len(self.tries) < self.most:
            self.tries.append(self.attempt(proposal))
        return self.best

    @property
    def best(self) -> int | None:
        """The largest micro-batch that has fitted."""
        return max((attempt.micro_batch for attempt in self.tries if attempt.fits), default=None)

    def fitting(self) -> list[int]:
        """Return the micro-batches that fit, in ascending order: those tried, and smaller ones that should."""
        tried = {attempt.micro_batch: attempt.fits for attempt in self.tries}
        smaller = [size for size in self.candidates if size <= (self.best or 0)]
        return [m for m in smaller if tried.get(m, not self._is_excluded(m) and self.predicted(m) <= self.room)]

    def _is_excluded(self, micro_batch: int) -> bool:
        """Return whether a failed try of a smaller one excludes this one.

        A try that nearly fits does not exclude the next larger one, as memory fragments.
        """

        def excludes(smaller: Try) -> bool:
            size, needed = smaller.micro_batch, smaller.needed_bytes
            spared = self.held.get(size, 0) - self.held.get(micro_batch, 0)
            if needed is None:
                return spared <= 0
            is_next = not self.stride and not any(size < between < micro_batch for between in self.candidates)
            return needed - spared > (1 + _CLEAR) * self.room or (spared <= 0 and not is_next)

        failed = (attempt for attempt in self.tries if not attempt.fits and attempt.micro_batch < micro_batch)
        return any(map(excludes, failed))

    def proposal(self) -> int | None:
        """Return the micro-batch to try next; ``None`` if the answer is known."""
        tried = {attempt.micro_batch for attempt in self.tries}
        open_ = [m for m in self.candidates if m > (self.best or 0) and m not in tried and not self._is_excluded(m)]
        if not open_:
            return None
        if sum(attempt.needed_bytes is not None for attempt in self.tries) < 2:
            smallest = self.candidates[0]  # from below, as a try that is too large may not reveal its need
            near = [size for size in open_ if size <= self.points[0] * smallest]
            return near[-1] if near and smallest in tried else open_[0]
        for times in self.points[1:]:
            near = [size for size in open_ if max(tried) < size <= times * self.candidates[0]]
            if near:
                return near[-1]
        farthest = self.stride * max(tried) if self.stride else max(open_)
        fitting = [m for m in open_ if self.predicted(m) <= self.room and m <= farthest]
        if fitting:
            last = self.tries[-1]
            is_misled = not last.fits and last.needed_bytes is None  # the line wrongly predicted that it fits
            return fitting[len(fitting) // 2 if is_misled else -1]
        return next((m for m in open_ if self.predicted(m) <= (1 + _CLEAR) * self.room), None)

    def predicted(self, micro_batch: int) -> float:
        """Return the bytes that a micro-batch needs, by the line through its neighbors among tries with a known need.

        Beyond the largest of these, the line through the two largest counts. Held bytes are added to the line.
        """
        needs = {
            attempt.micro_batch: attempt.needed_bytes for attempt in self.tries if attempt.needed_bytes is not None
        }
        points = sorted((size, needed - self.held.get(size, 0)) for size, needed in needs.items())
        held = self.held.get(micro_batch, 0)
        if len(points) < 2:
            return float(points[0][1] + held) if points else 0.0
        last = next((place for place, (size, _) in enumerate(points) if size >= micro_batch and place), len(points) - 1)
        (x, below), (y, above) = points[last - 1 : last + 1]
        return held + above + (above - below) / (y - x) * (micro_batch - y)
