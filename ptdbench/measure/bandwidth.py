"""Bandwidths by the definitions of nccl-tests, lines fitted to message times, and the fits stored for later runs.

The definitions are in ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests; for gather and scatter, in
``src/gather.cu`` and ``src/scatter.cu``. The size of a message is the whole in bytes: the sum of all shares if every
rank holds one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct, ValidationError, convert, to_builtins

from ptdbench import cache
from ptdbench.launch import settings
from ptdbench.launch.world import Peer
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


#: The folder of fits in the cache.
_KIND = "links"

#: Prefixes of the environment variables that affect the speed of messages.
_SETTINGS = ("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_")

#: Operations that compute: their time depends on the dtype.
_REDUCING = ("all_reduce", "reduce_scatter")


class Line(Struct, frozen=True):
    """The line fitted to a series, as stored."""

    alpha: float  #: Seconds.
    beta: float  #: Seconds per byte.
    largest: int  #: The largest size in bytes.


def fits_key(backend: str, peers: Sequence[Peer]) -> Mapping[str, object]:
    """Return the cache key of the fits: the backend, its settings, and the machine and device of each rank."""
    chosen = {name: value for name, value in settings.recorded(os.environ).items() if name.startswith(_SETTINGS)}
    ranks = [f"{peer.host} {peer.device}" for peer in peers]
    return {"backend": backend, "settings": chosen, "torch": torch.__version__, "ranks": ranks}


def keep_fits(of: Mapping[str, object], lines: Mapping[str, Line]) -> Path:
    """Store plausible lines by series: operation, dtype and reduction; raise OSError if that fails.

    Existing lines are kept for other series, or if they were fitted up to larger sizes.
    """
    kept = _lines(of)
    for name, line in lines.items():
        if line.alpha >= 0 and line.beta > 0 and line.largest >= kept.get(name, line).largest:
            kept[name] = line
    return cache.keep(_KIND, of, {"lines": to_builtins(kept)})


def fitted_seconds(of: Mapping[str, object], operation: str, dtype: str, calls: float, size: float) -> float | None:
    """Predict the seconds of consecutive calls over all ranks by a fit: ``calls * alpha + size * beta``.

    ``size``: the total bytes of all calls; ``dtype`` matters only for a reduction. ``None`` if there is no line, or the
    calls are larger than the fitted sizes.
    """
    series = f"{operation} {dtype} sum" if operation in _REDUCING else f"{operation} "
    for name, line in _lines(of).items():
        if name.startswith(series) and 0 < size <= calls * line.largest:
            return calls * line.alpha + size * line.beta
    return None


def _lines(of: Mapping[str, object]) -> dict[str, Line]:
    """Read the valid ones of the stored lines: someone may have edited the file."""
    stored, lines = cache.look_up(_KIND, of).get("lines"), {}
    for name, line in stored.items() if isinstance(stored, dict) else ():
        with suppress(ValidationError):
            lines[name] = convert(line, Line)
    return lines
