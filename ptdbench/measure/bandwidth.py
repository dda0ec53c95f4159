"""Bandwidths by the definitions of nccl-tests.

The definitions are in ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests; for gather and scatter, in
``src/gather.cu`` and ``src/scatter.cu``. The size of a message is the whole in bytes: the sum of all shares if every
rank holds one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: The source of the definitions, for readers.
SOURCE = "nccl-tests, doc/PERFORMANCE.md"


class Factor(NamedTuple):
    """The factor from algorithm bandwidth to bus bandwidth."""

    formula: str  # for readers, in terms of n
    of: Callable[[int], float]  # the factor for a number of ranks


#: Operations in which every rank, or the root, holds a share for each of the others.
_OF_SHARES = ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")

#: Bus bandwidth over algorithm bandwidth, by operation; a barrier moves no data and has neither.
FACTORS: dict[str, Factor] = {
    **dict.fromkeys(("broadcast", "reduce"), Factor("1", lambda ranks: 1.0)),
    "all_reduce": Factor("2(n-1)/n", lambda ranks: 2 * (ranks - 1) / ranks),
    **dict.fromkeys(_OF_SHARES, Factor("(n-1)/n", lambda ranks: (ranks - 1) / ranks)),
}


def bus_bandwidth(operation: str, size: int, seconds: float, ranks: int) -> float:
    """Return ``busbw = algbw * factor`` in bytes/s, the rate of the slowest link; raise KeyError if no data move."""
    return size / seconds * FACTORS[operation].of(ranks)
