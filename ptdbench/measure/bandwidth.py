"""Bandwidths by the definitions of nccl-tests, and lines fitted to message times.

The definitions are in ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests; for gather and scatter, in
``src/gather.cu`` and ``src/scatter.cu``. The size of a message is the whole in bytes: the sum of all shares if every
rank holds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ptdbench.measure.results import Fit

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


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Fit the latency-bandwidth line, seconds over bytes, that minimizes the sum of squared relative errors.

    Weighted least squares with weights ``1 / t^2``: times span orders of magnitude, and unweighted the largest message
    would dominate. Standard errors are from the covariance ``s^2 (A' W A)^-1``, where ``s^2`` is the weighted residual
    sum of squares over ``points - 2``. ``None`` for fewer than three different sizes, which leave no residual degree of
    freedom.
    """
    if len(set(sizes)) < 3:
        return None
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    (beta, alpha), covariance = np.polyfit(size, time, 1, w=1 / time, cov=True)
    beta_error, alpha_error = np.sqrt(np.diag(covariance)).tolist()
    misses = (alpha + beta * size) / time - 1
    weight = time**-2
    around_mean = float(weight @ (time - np.average(time, weights=weight)) ** 2)
    return Fit(
        alpha=float(alpha),
        beta=float(beta),
        alpha_error=alpha_error,
        beta_error=beta_error,
        r2=1 - float(misses @ misses) / around_mean if around_mean else math.nan,
        max_relative_error=float(np.abs(misses).max()),
        points=len(time),
    )
