"""Variation between runs, and the significance of differences: verdicts, ranks, intervals, the detectable difference.

The unit is the run, and logarithms are compared. docs/statistics.md has the model of a sweep's runs, the tests, their
limits and the sources; ``make ranks-truth`` measures the rates of false positives and detections.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

#: The probability of any false positive.
LEVEL = 0.05

#: The probability of detecting a difference of :attr:`Comparison.detectable`.
POWER = 0.9

#: The critical value above which the normal part of noncentral t is neglected: there SciPy's quantile hangs.
_WIDE = 100.0

#: Minimum number of runs for a verdict or an interval, per side: with two it is 13 standard errors wide.
MIN_RUNS = 3

#: Minimum number of runs for a comparison, per side.
LEAST_RUNS = 2

#: Maximum degrees of freedom of the prior; a sweep has too few configurations to estimate it, as Smyth does.
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
        add up. It counts for at most twice their degrees of freedom, and two thirds of its own, as the residuals of a
        block share its mean.
        """
        share = PRIOR_FREEDOM / (PRIOR_FREEDOM + self.freedom)
        share = min(share, 2 * measured.freedom / (3 * measured.freedom + self.freedom))
        return Spread(self.squares * share, self.freedom * share)


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
        self.paired = _two_way(samples)  #: Variation not explained by configuration and block.
        #: Variation not explained by the configuration, including drift of the machine.
        self.unpaired = sum((moments.spread for moments in self._moments.values()), Spread())

    def difference(self, left: Sample, right: Sample) -> Difference | None:
        """Compare two configurations, by their common blocks if there are enough, or neither has other runs.

        The variance is the pair's, with all others only as a prior, so that quiet configurations do not make a noisy
        one look quiet. ``None`` if one has a single run, or none.
        """
        if min(len(left), len(right)) < LEAST_RUNS:
            return None
        common = left.keys() & right.keys()
        is_paired = len(common) >= min(MIN_RUNS, max(len(left), len(right)))
        if is_paired:
            pairs = _spread([math.log(left[block] / right[block]) for block in common])
            measured = Spread(pairs.spread.squares / 2, pairs.spread.freedom)
            mean, runs, scale = pairs.mean, pairs.runs, 2 / pairs.runs
            spread = measured + (self.paired - measured).as_prior(measured)
        else:
            sides = [self._moments[id(sample)] for sample in (left, right)]
            mean, runs = sides[0].mean - sides[1].mean, min(side.runs for side in sides)
            scale = sum(1 / side.runs for side in sides)
            measured, others = _welch(*sides), self.unpaired - sides[0].spread - sides[1].spread
            spread = measured + others.as_prior(measured)
        return Difference(mean, spread.deviation * math.sqrt(scale), spread.freedom, runs, is_paired)

    def mean_error(self, sample: Sample) -> tuple[float, float] | None:
        """Return the standard error of the mean logarithm of a configuration, and its degrees of freedom.

        ``None`` with fewer than :data:`MIN_RUNS` runs.
        """
        if len(sample) < MIN_RUNS:
            return None
        moments = self._moments[id(sample)]
        others = self.unpaired - moments.spread
        spread = moments.spread + others.as_prior(moments.spread)
        return spread.deviation / math.sqrt(moments.runs), spread.freedom


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

    His degrees of freedom are too many if a side has few runs that happen to be alike, so they are limited.
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


@dataclass(frozen=True)
class Comparison:
    """A comparison of one configuration with another."""

    ratio: float  #: Its figure over the other's, by their geometric means.
    low: float  #: Lower end of the ratio's interval.
    high: float  #: Upper end of the interval.
    runs: int  #: Pairs of runs, or runs of the side with fewer.
    is_paired: bool  #: Whether runs of the same block were compared.
    #: The smallest difference, as a share, that is detected with probability :data:`POWER`, given the number of pairs
    #: and the upper limit of the estimated variation.
    detectable: float


def compare(difference: Difference, level: float = LEVEL, pairs: int = 1) -> Comparison:
    """Return a difference's confidence interval, at confidence ``1 - level``, and the detectable difference.

    ``pairs``: the number of pairs compared by :func:`differing`; with more, only larger differences are detectable.
    """
    margin = difference.error * _quantile(difference.freedom, 1 - level / 2)
    return Comparison(
        ratio=math.exp(difference.mean),
        low=math.exp(difference.mean - margin),
        high=1 + _share(difference.mean + margin),
        runs=difference.runs,
        is_paired=difference.is_paired,
        detectable=_detectable(difference.error * _caution(difference.freedom), difference.freedom, level / pairs),
    )


def margin(pool: Pool, sample: Sample, level: float = LEVEL) -> float | None:
    """Return the upper half-width of the confidence interval of a configuration's geometric mean, as a share.

    It holds for further runs of the same sweep, not for another day. ``None`` with fewer than
    :data:`MIN_RUNS` runs.
    """
    estimate = pool.mean_error(sample)
    if estimate is None:
        return None
    error, freedom = estimate
    return _share(error * _quantile(freedom, 1 - level / 2))


def faster(pool: Pool, samples: Sequence[Sample], level: float = LEVEL) -> list[set[int]]:
    """Return, for each configuration of a pool, the indices of those with a significantly larger figure.

    The probability of any false positive is at most ``level``, over all pairs together.
    """
    winners: list[set[int]] = [set() for _ in samples]
    judged = [place for place, sample in enumerate(samples) if len(sample) >= LEAST_RUNS]
    pairs = list(combinations(judged, 2))
    signs = differing([pool.difference(samples[left], samples[right]) for left, right in pairs], level)
    for (left, right), sign in zip(pairs, signs, strict=True):
        if sign:
            winner, loser = (left, right) if sign > 0 else (right, left)
            winners[loser].add(winner)
    return winners


def ranks(faster: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Return the best and the worst rank that each configuration may have; the largest figure has rank 1.

    The probability that any true rank is outside its range is at most the level of :func:`faster`. A configuration
    that differs from no other has the range ``(1, len(faster))``.
    """
    slower = Counter(chain.from_iterable(faster))
    return [(1 + len(winners), len(faster) - slower[place]) for place, winners in enumerate(faster)]


def differing(differences: Sequence[Difference | None], level: float = LEVEL) -> list[int]:
    """Compare all pairs: 1 if the first is larger, -1 if the second is, 0 without a significant difference.

    The probability of any false positive is at most ``level``, over all pairs together.
    """
    adjusted = iter(holm(p_values([difference for difference in differences if difference])))
    return [
        (1 if difference.mean > 0 else -1) if difference and next(adjusted) <= level else 0
        for difference in differences
    ]


def holm(chances: Sequence[float]) -> list[float]:
    """Adjust the p values of several tests by Holm's method, for comparison with the family-wise level."""
    adjusted, largest = [0.0] * len(chances), 0.0
    for done, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        largest = max(largest, (len(chances) - done) * chances[place])
        adjusted[place] = min(largest, 1.0)
    return adjusted


def interim_looks(most: int) -> list[int]:
    """Return the numbers of blocks after which ``repeat=auto`` checks whether it may stop, the last being ``most``.

    Each look has substantially more information, and there are few enough for each to have a fair share of the level.
    """
    looks = [most]
    while (earlier := int(looks[0] / 1.6)) >= MIN_RUNS:
        looks.insert(0, earlier)
    return looks


def level_of_look(most: int) -> float:
    """Return the level at each of :func:`interim_looks`: together :data:`LEVEL`, by Bonferroni's inequality."""
    return LEVEL / len(interim_looks(most))


def p_values(differences: Sequence[Difference]) -> list[float]:
    """Return the two-sided p value of each difference."""
    if not differences:
        return []
    from scipy import special  # imported late: it takes a quarter of a second, which tables of single runs save

    statistics = [math.inf if d.mean and not d.error else abs(d.mean) / (d.error or 1.0) for d in differences]
    chances = special.stdtr([difference.freedom for difference in differences], [-size for size in statistics])
    return [2 * chance for chance in chances.tolist()]


def _quantile(freedom: float, share: float) -> float:
    from scipy import special

    return float(special.stdtrit(freedom, share))


def _caution(freedom: float) -> float:
    """Return the factor from an estimated standard deviation to its upper limit at 80 % confidence."""
    from scipy import special

    return math.sqrt(freedom / float(special.chdtri(freedom, 0.8)))


def _detectable(error: float, freedom: float, level: float) -> float:
    """By the noncentral t distribution, whose parameter is the true difference over the standard error."""
    from scipy import special

    critical = _quantile(freedom, 1 - level / 2)
    if critical > _WIDE:
        return _share(error * critical * math.sqrt(float(special.chdtri(freedom, 1 - POWER)) / freedom))
    return _share(error * float(special.nctdtrinc(freedom, 1 - POWER, critical)))


def _share(log: float) -> float:
    """Return a ratio minus 1 from its logarithm, limited to the range of floats."""
    return math.expm1(min(log, 700.0))
