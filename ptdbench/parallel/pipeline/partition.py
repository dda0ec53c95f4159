"""Cutting a chain of parts into stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Split ``costs`` into ``stages`` non-empty runs with the smallest possible maximum sum.

    A pipeline is as fast as its slowest stage. Among equally good splits it takes the one with shorter early stages,
    because under 1F1B an earlier stage holds more micro-batches in memory.

    Args:
        costs: Cost of each part in order, in any unit.
        stages: Number of runs; at most ``len(costs)``.

    Returns:
        The indices of the parts, one range per stage.

    Raises:
        ValueError: There are more stages than parts.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages cannot be made of {len(costs)} parts")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        """Smallest possible cost of the slowest of ``left`` stages from part ``start`` on, and the first one's end."""
        if left == 1:
            return before[-1] - before[start], len(costs)
        last_end = len(costs) - left + 1
        return min(
            (max(before[end] - before[start], best(end, left - 1)[0]), end) for end in range(start + 1, last_end + 1)
        )

    cuts, start = [], 0
    for left in range(stages, 0, -1):
        end = best(start, left)[1]
        cuts.append(range(start, end))
        start = end
    return cuts
