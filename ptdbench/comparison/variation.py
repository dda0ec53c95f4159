"""Variation between runs, and the distance of two configurations by several runs of each.

The unit is the run: steps of one run share its processes, its memory and its neighbours, so that a thousand of them say
little of the next run (T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). What is
compared are logarithms: a busy machine slows all configurations by a factor.

Runs of a sweep are a two-way layout, ``log figure = configuration + block + residual``: a block is so short that a
drift of the machine concerns all of it. Three runs of a pair say little of how much its runs differ. What all others of
the sweep, and earlier sweeps of the machine, say of it is added to it as a prior with degrees of freedom of its own
(G. Smyth, "Linear models and empirical Bayes methods for assessing differential expression in microarray experiments",
Statistical Applications in Genetics and Molecular Biology 3, 2004).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ptdbench.records.schema import Quantity

#: Fewer runs of one side say nothing unless earlier sweeps do: with two, one lucky run decides.
MIN_RUNS = 3

#: Degrees of freedom, at most, of what other runs say of a pair. In Smyth's model the variances of nine of ten
#: configurations then lie between 0.52 and 2.9 times the common one, by the quantiles of chi-squared. He estimates it
#: from thousands of variances, which a sweep does not have.
PRIOR_FREEDOM = 8

#: The figure of each run of a configuration, greater than 0, by its block; runs of no block have keys of their own.
Sample = Mapping[Hashable, float]


@dataclass(frozen=True)
class Spread:
    """An estimated variance of logarithms of figures."""

    squares: Quantity = 0.0  #: The sum of the squared residuals.
    freedom: Quantity = 0.0  #: Their degrees of freedom; with none nothing is known.

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 where nothing is known."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else 0.0

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.squares + other.squares, self.freedom + other.freedom)

    def __sub__(self, part: Spread) -> Spread:
        freedom = max(self.freedom - part.freedom, 0.0)
        return Spread(max(self.squares - part.squares, 0.0), freedom) if freedom else Spread()  # no more than rounding

    def as_prior(self) -> Spread:
        """The same variance with the degrees of freedom that it has for other runs.

        The variance of its logarithm is about ``2 / freedom``, and that among configurations ``2 / PRIOR_FREEDOM``;
        they add up.
        """
        share = PRIOR_FREEDOM / (PRIOR_FREEDOM + self.freedom)
        return Spread(self.squares * share, self.freedom * share)


@dataclass(frozen=True)
class Noise:
    """The random difference between runs of the same configuration."""

    paired: Spread = Spread()  #: By what neither their configuration nor their block explains.
    unpaired: Spread = Spread()  #: By what their configuration does not explain, a drift of the machine included.

    def __add__(self, other: Noise) -> Noise:
        return Noise(self.paired + other.paired, self.unpaired + other.unpaired)


class Difference(NamedTuple):
    """The distance of two configurations; half a million of them rank a thousand."""

    mean: float  #: Of the logarithm of the first one's figure over the other's.
    error: float  #: Standard error of that.
    freedom: float  #: Degrees of freedom of the standard error.
    runs: int  #: Pairs of runs, or runs of the side that has fewer.
    is_paired: bool  #: Whether runs of the same block were compared.


class _Moments(NamedTuple):
    """Of the logarithms of a sample."""

    mean: float
    spread: Spread
    runs: int


class Pool:
    """Configurations of one model that are compared, each by its runs, and how much these and earlier ones vary."""

    def __init__(self, samples: Sequence[Sample], earlier: Noise | None = None) -> None:
        self._samples = samples  # the keys below are good as long as these are there
        self._moments = {id(sample): _moments(sample) for sample in samples if sample}
        self._noise = noise(samples)
        self._earlier = earlier or Noise()
        self._least = 1 if earlier else MIN_RUNS

    def is_enough(self, sample: Sample) -> bool:
        """Return whether there are enough runs to compare the configuration."""
        return len(sample) >= self._least

    def difference(self, one: Sample, other: Sample) -> Difference | None:
        """Compare two configurations, by their common blocks where they have enough.

        The variance is that of this pair, and as a prior that of all others: those of quiet configurations are not
        taken for that of a noisy one (P. Games and J. Howell, Journal of Educational Statistics 1, 1976).
        ``None`` where there are too few runs, and nothing is known from earlier ones.
        """
        if not (self.is_enough(one) and self.is_enough(other)):
            return None
        common = one.keys() & other.keys()
        is_paired = len(common) >= min(MIN_RUNS, len(one), len(other))
        if is_paired:
            apart = _spread([math.log(one[block] / other[block]) for block in common])
            own = Spread(apart.spread.squares / 2, apart.spread.freedom)
            mean, runs, scale = apart.mean, apart.runs, 2 / apart.runs
            known = self._moderated(own, self._noise.paired - own, self._earlier.paired)
        else:
            sides = [self._moments[id(sample)] for sample in (one, other)]
            mean, runs = sides[0].mean - sides[1].mean, min(side.runs for side in sides)
            scale = sum(1 / side.runs for side in sides)
            others = self._noise.unpaired - sides[0].spread - sides[1].spread
            known = self._moderated(_welch(*sides), others, self._earlier.unpaired)
        if not known.freedom:
            return None
        return Difference(mean, known.deviation * math.sqrt(scale), known.freedom, runs, is_paired)

    def mean_error(self, sample: Sample) -> tuple[float, float] | None:
        """Return the standard error of the mean logarithm of a configuration, and its degrees of freedom.

        ``None`` with fewer than :data:`MIN_RUNS` runs.
        """
        if len(sample) < MIN_RUNS:
            return None
        own = self._moments[id(sample)]
        others = self._noise.unpaired - own.spread
        known = self._moderated(own.spread, others, self._earlier.unpaired)
        return known.deviation / math.sqrt(own.runs), known.freedom

    @staticmethod
    def _moderated(own: Spread, others: Spread, earlier: Spread) -> Spread:
        """Smyth's moderated variance: all that is known, weighted by degrees of freedom.

        Earlier sweeps do not count where runs differ more today: they may be of a quieter day, and the small variance
        would show differences where there are none.
        """
        today = own + others.as_prior()
        return today if today.deviation > earlier.deviation else today + earlier.as_prior()


def noise(samples: Sequence[Sample]) -> Noise:
    """Estimate how much runs of these configurations differ."""
    return Noise(_two_way(samples), sum((_moments(sample).spread for sample in samples if sample), Spread()))


def geometric_mean(sample: Sample) -> float | None:
    """The typical figure of a configuration; ``None`` without runs."""
    if len(sample) == 1:
        return next(iter(sample.values()))  # to the last digit
    return math.exp(_moments(sample).mean) if sample else None


def _two_way(samples: Sequence[Sample]) -> Spread:
    """The residuals of ``log figure = configuration + block``, by least squares.

    In turn the mean of each configuration and of each block is taken off, which ends after the first time where every
    configuration has a run of every block, and converges where some are missing.
    """
    shared = {block for block, count in Counter(block for sample in samples for block in sample).items() if count > 1}
    rows = [{block: math.log(sample[block]) for block in sample.keys() & shared} for sample in samples]
    rows = [row for row in rows if row]
    freedom = sum(map(len, rows)) - len(rows) - len(shared) + _unconnected(rows)
    if not rows or freedom <= 0:
        return Spread()
    for _ in range(100):
        for row in rows:
            mean = math.fsum(row.values()) / len(row)
            row.update((block, log - mean) for block, log in row.items())
        columns: dict[Hashable, list[float]] = {}
        for row in rows:
            for block, log in row.items():
                columns.setdefault(block, []).append(log)
        means = {block: math.fsum(logs) / len(logs) for block, logs in columns.items()}
        for row in rows:
            row.update((block, log - means[block]) for block, log in row.items())
        if max(map(abs, means.values())) < 1e-12:
            break
    return Spread(math.fsum(log**2 for row in rows for log in row.values()), freedom)


def _unconnected(rows: Sequence[Sample]) -> int:
    """The number of parts that have no block in common, such as sweeps: each has a mean of its own."""
    parts: list[set[Hashable]] = []
    for row in rows:
        touching = [part for part in parts if not part.isdisjoint(row)]
        parts = [*(part for part in parts if part not in touching), set(row).union(*touching)]
    return len(parts)


def _welch(one: _Moments, other: _Moments) -> Spread:
    """The variance of a run, from two configurations each with its own, with Welch's degrees of freedom."""
    sides = (one, other)
    if min(one.runs, other.runs) < 2:
        return Spread()
    parts = [side.spread.deviation**2 / side.runs for side in sides]
    squared = sum(part**2 / side.spread.freedom for part, side in zip(parts, sides, strict=True))
    freedom = sum(parts) ** 2 / squared if squared else one.spread.freedom + other.spread.freedom
    return Spread(sum(parts) / (1 / one.runs + 1 / other.runs) * freedom, freedom)


def _moments(sample: Sample) -> _Moments:
    return _spread([math.log(value) for value in sample.values()])


def _spread(logs: Sequence[float]) -> _Moments:
    """The mean of logarithms, and their spread around it."""
    mean = math.fsum(logs) / len(logs)
    return _Moments(mean, Spread(math.fsum((log - mean) ** 2 for log in logs), len(logs) - 1), len(logs))
