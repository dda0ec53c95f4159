"""Variation between runs, and the difference of two configurations estimated from several runs of each.

The unit is the run: steps of one run share its processes, its memory and its neighbours, so that a thousand steps say
little about the next run (T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). Logarithms
are compared, because a busy machine slows all configurations by a factor.

Runs of a sweep are a two-way layout, ``log figure = configuration + block + residual``: a block is so short that drift
of the machine affects all of it. As three runs of a pair say little about their variance, the variance of the sweep's
other runs is added as a prior with its own degrees of freedom (G. Smyth, "Linear models and empirical Bayes methods for
assessing differential expression in microarray experiments", Statistical Applications in Genetics and Molecular Biology
3, 2004).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: Minimum number of runs for a verdict or an interval, per side: with two it is 13 standard errors wide.
MIN_RUNS = 3

#: Minimum number of runs for a comparison, per side.
LEAST_RUNS = 2

#: Maximum degrees of freedom of the prior. In Smyth's model, the variances of nine in ten configurations are then
#: between 0.52 and 2.9 times the common variance, by the quantiles of chi-squared. Smyth estimates this parameter from
#: thousands of variances; a sweep has too few.
PRIOR_FREEDOM = 8

#: The figure of each run of a configuration, greater than 0, by block; runs without a block have unique keys.
Sample = Mapping[Hashable, float]


@dataclass(frozen=True)
class Spread:
    """An estimated variance of the logarithms of figures."""

    squares: float = 0.0  #: Sum of squared residuals.
    freedom: float = 0.0  #: Degrees of freedom; 0 if the variance is unknown.

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 if unknown."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else 0.0

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.squares + other.squares, self.freedom + other.freedom)

    def __sub__(self, part: Spread) -> Spread:
        freedom = max(self.freedom - part.freedom, 0.0)
        return Spread(max(self.squares - part.squares, 0.0), freedom) if freedom else Spread()  # only rounding is left

    def as_prior(self, measured: Spread) -> Spread:
        """Return the same variance with the degrees of freedom that it has as a prior for runs with a measured one.

        The variance of its logarithm is about ``2 / freedom``, and ``2 / PRIOR_FREEDOM`` among configurations; they
        add up. It counts for at most twice their degrees of freedom, and two
        thirds of its own, as the residuals of a block share its mean: otherwise a configuration of 100 times the
        variance would seem to differ from the others in up to one of ten sweeps (``make ranks-truth``).
        """
        share = PRIOR_FREEDOM / (PRIOR_FREEDOM + self.freedom)
        share = min(share, 2 * measured.freedom / (3 * measured.freedom + self.freedom))
        return Spread(self.squares * share, self.freedom * share)


@dataclass(frozen=True)
class Noise:
    """The random variation between runs of the same configuration."""

    paired: Spread = Spread()  #: Variation not explained by configuration and block.
    unpaired: Spread = Spread()  #: Variation not explained by the configuration, including drift of the machine.


class Difference(NamedTuple):
    """The difference of two configurations; a cheap tuple, as ranking a thousand takes half a million."""

    mean: float  #: Mean logarithm of the first one's figure over the other's.
    error: float  #: Standard error of the mean.
    freedom: float  #: Degrees of freedom of the standard error.
    runs: int  #: Pairs of runs, or runs of the side with fewer.
    is_paired: bool  #: Whether runs of the same block were compared.


class _Moments(NamedTuple):
    mean: float
    spread: Spread
    runs: int


class Pool:
    """Configurations of one model to compare, each with its runs, and the noise of these runs."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples  # keeps the ids below valid
        self._moments = {id(sample): _moments(sample) for sample in samples if sample}
        self._noise = noise(samples)

    def difference(self, left: Sample, right: Sample) -> Difference | None:
        """Compare two configurations, by their common blocks if there are enough, or neither has other runs.

        The variance is the pair's, with all others only as a prior, so that quiet configurations do not make a noisy
        one look quiet (P. Games and J. Howell, Journal of Educational Statistics 1, 1976). ``None`` if one has a single
        run, or none.
        """
        if min(len(left), len(right)) < LEAST_RUNS:
            return None
        common = left.keys() & right.keys()
        is_paired = len(common) >= min(MIN_RUNS, max(len(left), len(right)))
        if is_paired:
            pairs = _spread([math.log(left[block] / right[block]) for block in common])
            measured = Spread(pairs.spread.squares / 2, pairs.spread.freedom)
            mean, runs, scale = pairs.mean, pairs.runs, 2 / pairs.runs
            spread = measured + (self._noise.paired - measured).as_prior(measured)
        else:
            sides = [self._moments[id(sample)] for sample in (left, right)]
            mean, runs = sides[0].mean - sides[1].mean, min(side.runs for side in sides)
            scale = sum(1 / side.runs for side in sides)
            measured, others = _welch(*sides), self._noise.unpaired - sides[0].spread - sides[1].spread
            spread = measured + others.as_prior(measured)
        return Difference(mean, spread.deviation * math.sqrt(scale), spread.freedom, runs, is_paired)

    def mean_error(self, sample: Sample) -> tuple[float, float] | None:
        """Return the standard error of the mean logarithm of a configuration, and its degrees of freedom.

        ``None`` with fewer than :data:`MIN_RUNS` runs.
        """
        if len(sample) < MIN_RUNS:
            return None
        moments = self._moments[id(sample)]
        others = self._noise.unpaired - moments.spread
        spread = moments.spread + others.as_prior(moments.spread)
        return spread.deviation / math.sqrt(moments.runs), spread.freedom


def noise(samples: Sequence[Sample]) -> Noise:
    """Estimate the noise between runs of these configurations."""
    return Noise(_two_way(samples), sum((_moments(sample).spread for sample in samples if sample), Spread()))


def geometric_mean(sample: Sample) -> float | None:
    """Return the typical figure of a configuration; ``None`` without runs."""
    if len(sample) == 1:
        return next(iter(sample.values()))  # exact to the last digit
    return math.exp(_moments(sample).mean) if sample else None


def _two_way(samples: Sequence[Sample]) -> Spread:
    """Return the spread of the residuals of ``log figure = configuration + block``, by least squares."""
    counts = Counter(block for sample in samples for block in sample)
    cells = [
        (number, block, math.log(figure))
        for number, sample in enumerate(samples)
        for block, figure in sample.items()
        if counts[block] > 1
    ]
    if not cells:
        return Spread()
    place = {block: len(samples) + number for number, block in enumerate(dict.fromkeys(block for _, block, _ in cells))}
    design, logs = np.zeros((len(cells), len(samples) + len(place))), np.array([log for *_, log in cells])
    for row, (number, block, _) in zip(design, cells, strict=True):
        row[[number, place[block]]] = 1.0
    effects, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(cells) - int(rank)
    return Spread(float(np.sum((logs - design @ effects) ** 2)), freedom) if freedom else Spread()


def _welch(left: _Moments, right: _Moments) -> Spread:
    """Return the variance of a run, from two configurations with different variances, by Welch's method.

    His degrees of freedom are too many if a side has few runs that happen to be alike, so they are limited: to 1 for
    two runs, for which his test would be wrong in one of ten cases, and to 4 for three, as for three runs each.
    """
    sides, fewest = (left, right), min(left.runs, right.runs)
    parts = [side.spread.deviation**2 / side.runs for side in sides]
    squared = sum(part**2 / side.spread.freedom for part, side in zip(parts, sides, strict=True))
    freedom = sum(parts) ** 2 / squared if squared else left.spread.freedom + right.spread.freedom
    freedom = min(freedom, (fewest - 1) ** 2)
    return Spread(sum(parts) / (1 / left.runs + 1 / right.runs) * freedom, freedom)


def _moments(sample: Sample) -> _Moments:
    return _spread([math.log(value) for value in sample.values()])


def _spread(logs: Sequence[float]) -> _Moments:
    mean = math.fsum(logs) / len(logs)
    return _Moments(mean, Spread(math.fsum((log - mean) ** 2 for log in logs), len(logs) - 1), len(logs))
