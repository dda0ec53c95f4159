"""Statistics of step times, without assuming a normal distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def warmup_end(step_seconds: Sequence[float], minimum: int = 0) -> int:
    """The number of leading warm-up steps, by the MSER rule.

    MSER drops the ``d`` steps that make the standard error of the remaining mean smallest,
    ``argmin_d sum_{i >= d} (x_i - mean_d)^2 / (n - d)^2``: dropping more than the slow first steps costs more in
    sample size than it gains in variance. Source: K. P. White, "An effective truncation heuristic for bias
    reduction in simulation output", Simulation 69(6), 1997. ``d`` is limited to the first half, because near the
    end the estimate is based on too few steps.

    Args:
        step_seconds: Seconds of every step, the first one included.
        minimum: Minimum number of warm-up steps, limited to half of all steps.

    Returns:
        The index of the first timed step, between 0 and ``len(step_seconds) // 2``.
    """
    count = len(step_seconds)
    last = count // 2
    first = min(minimum, last)
    if first == last:
        return first
    # Running sums from the end give every candidate in one pass; centering avoids cancellation.
    centered = np.asarray(step_seconds, dtype=np.float64) - np.median(step_seconds)
    remaining = np.arange(count, 0, -1)
    total = np.cumsum(centered[::-1])[::-1]
    squares = np.cumsum(centered[::-1] ** 2)[::-1]
    mser = (squares - total**2 / remaining) / remaining**2
    return first + int(np.argmin(mser[first : last + 1]))


def summary(step_seconds: Sequence[float]) -> dict[str, Any]:
    """Summarize location and spread of step times.

    Returns:
        ``median``, ``mean``, ``p5`` and ``p95`` in seconds (quantiles interpolate linearly; all ``None``
        without steps), and ``ci95``, the 95 % interval of the median as ``[low, high]``
        (:func:`median_interval`).
    """
    if not len(step_seconds):
        return dict.fromkeys(("median", "mean", "p5", "p95", "ci95"))
    times = np.asarray(step_seconds, dtype=np.float64)
    p5, median, p95 = np.quantile(times, (0.05, 0.5, 0.95)).tolist()
    return {"median": median, "mean": float(times.mean()), "p5": p5, "p95": p95, "ci95": median_interval(step_seconds)}


def median_interval(values: Sequence[float]) -> list[float] | None:
    """A distribution-free 95 % confidence interval of the median, from order statistics.

    The median of the distribution lies outside ``[x_(k), x_(n+1-k)]`` with probability
    ``2 P(Binomial(n, 1/2) < k)`` (David and Nagaraja, "Order Statistics", 3rd edition, section 7.1). The
    largest ``k`` for which that is at most 5 % is taken. It assumes independent values; with correlated steps the
    true interval is wider.

    Returns:
        ``[low, high]``, or ``None`` below six values: even their whole range covers less than 95 %.
    """
    count = len(values)
    outside, rank = 0.0, 0
    while True:
        log_probability = (
            math.lgamma(count + 1) - math.lgamma(rank + 1) - math.lgamma(count - rank + 1) - count * math.log(2)
        )
        outside += 2 * math.exp(log_probability)
        if outside > 0.05:
            break
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return [float(ordered[rank - 1]), float(ordered[count - rank])]
