"""Sets of moments, as sorted lists of disjoint intervals ``(start, end)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of them; they may overlap and come in any order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments in both of two sets."""
    found = []
    mine, theirs = 0, 0
    while mine < len(some) and theirs < len(others):
        start = max(some[mine][0], others[theirs][0])
        end = min(some[mine][1], others[theirs][1])
        if end > start:
            found.append((start, end))
        if some[mine][1] < others[theirs][1]:
            mine += 1
        else:
            theirs += 1
    return found


def subtract(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments of one set that are not in the other."""
    ends = (float("-inf"), float("inf"))
    edges = [ends[0], *(edge for interval in others for edge in interval), ends[1]]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return intersect(some, gaps)


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)
