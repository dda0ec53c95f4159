"""How sure a difference between configurations is, from several runs of each.

The unit is the run: steps of one run share its processes, its memory and its neighbours, so that a thousand of them say
little of the next run (T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). What is
compared are logarithms: a busy machine slows all configurations by a factor.

- Runs of the same block are compared with each other, by Student's t of their differences, because a block is so short
  that a drift of the machine concerns all of it. Runs without common blocks are compared by Welch's t.
- Over several pairs the level holds for all of them together (S. Holm, "A simple sequentially rejective multiple test
  procedure", Scandinavian Journal of Statistics 6, 1979). The range of ranks that follows holds for all ranks together
  (D. Al Mohamad, J. Goeman and E. van Zwet, "Simultaneous confidence intervals for ranks", Biometrics 78, 2022).

``make compare-truth`` measures how often that finds a difference where there is none, and where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

#: The chance to see any difference where there is none.
LEVEL = 0.05

#: The chance with which a difference of the :attr:`Comparison.detectable` size is seen.
POWER = 0.9

#: Fewer pairs of runs, or runs of one side, say nothing: with two, one lucky run decides.
LEAST = 3

#: The figure of each run of a configuration, greater than 0, by its block; runs of no block have keys of their own.
Sample = Mapping[Hashable, float]


@dataclass(frozen=True)
class Spread:
    """How much runs of the same configuration differ.

    Attributes:
        deviation: Standard deviation of the logarithm of a run's figure.
        freedom: Degrees of freedom of that.
    """

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Comparison:
    """One configuration against another.

    Attributes:
        ratio: Its figure over the other's, by their geometric means.
        low: Lower end of the interval of the ratio.
        high: Upper end.
        p: The chance of so large a difference, or a larger one, where there is none.
        runs: Pairs of runs, or runs of the side that has fewer.
        is_paired: Whether runs of the same block were compared.
        detectable: The smallest difference, as a share, that would have been seen with a chance of :data:`POWER`, also
            among as many pairs as are compared. How much runs vary is itself an estimate: its upper limit is used.
    """

    ratio: float
    low: float
    high: float
    p: float
    runs: int
    is_paired: bool
    detectable: float


class _Difference(NamedTuple):
    """The mean difference of two logarithms; half a million of them rank a thousand configurations."""

    mean: float
    error: float
    freedom: float
    runs: int
    is_paired: bool


def compare(
    one: Sample, other: Sample, level: float = LEVEL, spread: Spread | None = None, pairs: int = 1
) -> Comparison | None:
    """Compare two configurations.

    Args:
        one: The runs of the first.
        other: Those of the second.
        level: The interval has the ratio with a chance of ``1 - level``.
        spread: What is known from earlier runs, for configurations with less than :data:`LEAST` runs.
        pairs: How many are compared by :func:`differing`: each has to show more than if it were alone.

    Returns:
        ``None`` where there are too few runs, and nothing is known from earlier ones.
    """
    found = _difference(one, other, spread)
    if found is None:
        return None
    margin = found.error * _quantile(found.freedom, 1 - level / 2)
    return Comparison(
        ratio=math.exp(found.mean),
        low=math.exp(found.mean - margin),
        high=1 + _share(found.mean + margin),
        p=_chances([found])[0],
        runs=found.runs,
        is_paired=found.is_paired,
        detectable=_detectable(found.error * _caution(found.freedom), found.freedom, level / pairs),
    )


def geometric_mean(sample: Sample) -> float | None:
    """The typical figure of a configuration; ``None`` without runs."""
    if len(sample) == 1:
        return next(iter(sample.values()))  # to the last digit
    return math.exp(_moments([math.log(value) for value in sample.values()])[0]) if sample else None


def margin(sample: Sample, level: float = LEVEL) -> float | None:
    """How far the interval of a configuration's geometric mean reaches upwards, as a share.

    It has what other runs of the same sweep would give; on another day the machine may be another one.

    Returns:
        ``None`` with less than :data:`LEAST` runs.
    """
    if len(sample) < LEAST:
        return None
    _, variance = _moments([math.log(value) for value in sample.values()])
    return _share(math.sqrt(variance / len(sample)) * _quantile(len(sample) - 1, 1 - level / 2))


def within(spread: Spread, runs: int, level: float = LEVEL, pairs: int = 1) -> float:
    """The largest difference, as a share, that configurations with so few runs may show where there is none.

    Args:
        spread: What is known from earlier runs.
        runs: Of each configuration.
        level: As for :func:`compare`.
        pairs: Of how many pairs of configurations none may show a larger one.
    """
    critical = _quantile(spread.freedom, 1 - level / (2 * pairs))
    return _share(spread.deviation * math.sqrt(2 / runs) * critical)


def ranks(samples: Sequence[Sample], level: float = LEVEL, spread: Spread | None = None) -> list[tuple[int, int]]:
    """The best and the worst rank that each configuration may have, 1 being that of the largest figure.

    The chance that any of the true ranks lies outside is at most ``level``. A configuration that differs from no other
    has the range ``(1, len(samples))``.

    Args:
        samples: The runs of each configuration.
        level: That chance.
        spread: As for :func:`compare`.
    """
    better, worse = [0] * len(samples), [0] * len(samples)
    judged = [place for place, sample in enumerate(samples) if _is_enough(sample) or spread]
    pairs = list(combinations(judged, 2))
    for (one, other), sign in zip(
        pairs, differing([(samples[i], samples[j]) for i, j in pairs], level, spread), strict=True
    ):
        if sign:
            winner, loser = (one, other) if sign > 0 else (other, one)
            worse[winner] += 1
            better[loser] += 1
    return [(1 + up, len(samples) - down) for up, down in zip(better, worse, strict=True)]


def differing(pairs: Sequence[tuple[Sample, Sample]], level: float = LEVEL, spread: Spread | None = None) -> list[int]:
    """Which of these pairs differ: 1 where the first is larger, -1 where the second is, 0 where nothing is seen.

    The chance that any of them is said to differ that does not is at most ``level``, for all pairs together.
    """
    distinct = {id(sample): sample for pair in pairs for sample in pair}
    moments = {key: _moments_of(sample) for key, sample in distinct.items() if sample}
    found = [_difference(one, other, spread, moments.get(id(one)), moments.get(id(other))) for one, other in pairs]
    known = [place for place, one in enumerate(found) if one]
    adjusted = holm(_chances([one for one in found if one]))
    signs = [0] * len(pairs)
    for place, chance in zip(known, adjusted, strict=True):
        if chance <= level:
            signs[place] = 1 if found[place].mean > 0 else -1  # type: ignore[union-attr]
    return signs


def chance_of_failures(was: int, before: int, now: int, after: int) -> float:
    """The chance that so many failures, or more, fall on the runs after a change that has no effect.

    By Fisher's exact test, one-sided.

    Args:
        was: Failed runs before.
        before: All runs before.
        now: Failed runs after.
        after: All runs after.
    """
    failed = was + now
    splits = (math.comb(after, more) * math.comb(before, failed - more) for more in range(now, min(failed, after) + 1))
    return sum(splits) / math.comb(before + after, failed)


def holm(chances: Sequence[float]) -> list[float]:
    """Adjust the p values of several tests: one is significant at a level if its adjusted value is at most that."""
    adjusted, largest = [0.0] * len(chances), 0.0
    for done, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        largest = max(largest, (len(chances) - done) * chances[place])
        adjusted[place] = min(largest, 1.0)
    return adjusted


def spread_of(samples: Sequence[Sample]) -> Spread | None:
    """How much runs of the same configuration differ, over configurations; ``None`` if none has two runs."""
    several = [_moments([math.log(value) for value in sample.values()]) for sample in samples if len(sample) > 1]
    freedoms = [len(sample) - 1 for sample in samples if len(sample) > 1]
    if not several:
        return None
    squares = math.fsum(variance * freedom for (_, variance), freedom in zip(several, freedoms, strict=True))
    return Spread(math.sqrt(squares / sum(freedoms)), sum(freedoms))


def runs_needed(one: Sample, other: Sample, share: float, level: float = LEVEL, most: int = 10_000) -> int | None:
    """How many runs of each it takes to see a difference with a chance of :data:`POWER`.

    Args:
        one: Runs of a configuration.
        other: Those of another; how much they differ in how they vary says what is needed.
        share: The difference, as a share of the figure.
        level: As for :func:`compare`.
        most: The largest answer.

    Returns:
        ``None`` where these are too few to tell, or more than ``most`` are needed.
    """
    found = _difference(one, other, None)
    if found is None:
        return None
    deviation = found.error * _caution(found.freedom) * math.sqrt(found.runs)

    def is_enough(runs: int) -> bool:
        freedom = (runs - 1) * (1 if found.is_paired else 2)
        return _detectable(deviation / math.sqrt(runs), freedom, level) <= share

    low, high = LEAST, LEAST
    while not is_enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


def looks(most: int) -> list[int]:
    """After how many blocks of repeats ``repeat=auto`` looks whether it may stop, the last one being ``most``.

    They lie so far apart that the next one knows more, and are so few that each has a fair share of the level.
    """
    found = [most]
    while (earlier := int(found[0] / 1.6)) >= LEAST:
        found.insert(0, earlier)
    return found


def level_of_look(most: int) -> float:
    """The level at each of :func:`looks`: together they have :data:`LEVEL`, by Bonferroni's inequality."""
    return LEVEL / len(looks(most))


def _difference(
    one: Sample,
    other: Sample,
    spread: Spread | None,
    of_one: tuple[float, float] | None = None,
    of_other: tuple[float, float] | None = None,
) -> _Difference | None:
    """By pairs where there are enough, else by both means, else by what is known from earlier runs.

    Args:
        one: The runs of the first.
        other: Those of the second.
        spread: As for :func:`compare`.
        of_one: :func:`_moments_of` the first, where they are at hand.
        of_other: The same of the second.
    """
    fewest = min(len(one), len(other))
    if not fewest or (fewest < LEAST and not spread):
        return None
    if fewest >= LEAST and len(common := one.keys() & other.keys()) >= LEAST:
        mean, variance = _moments([math.log(one[block] / other[block]) for block in common])
        return _Difference(mean, math.sqrt(variance / len(common)), len(common) - 1, len(common), is_paired=True)
    sides = (of_one or _moments_of(one), of_other or _moments_of(other))
    difference = sides[0][0] - sides[1][0]
    if fewest >= LEAST:
        parts = [variance / len(side) for (_, variance), side in zip(sides, (one, other), strict=True)]
        squared = [part**2 / (len(side) - 1) for part, side in zip(parts, (one, other), strict=True)]
        freedom = sum(parts) ** 2 / sum(squared) if sum(squared) else len(one) + len(other) - 2.0
        return _Difference(difference, math.sqrt(sum(parts)), freedom, fewest, is_paired=False)
    assert spread
    error = spread.deviation * math.sqrt(1 / len(one) + 1 / len(other))
    return _Difference(difference, error, spread.freedom, fewest, is_paired=False)


def _is_enough(sample: Sample) -> bool:
    return len(sample) >= LEAST


def _moments_of(sample: Sample) -> tuple[float, float]:
    return _moments([math.log(value) for value in sample.values()])


def _moments(logs: Sequence[float]) -> tuple[float, float]:
    """The mean and the variance of a sample."""
    mean = math.fsum(logs) / len(logs)
    return mean, math.fsum((log - mean) ** 2 for log in logs) / max(len(logs) - 1, 1)


def _chances(found: Sequence[_Difference]) -> list[float]:
    """The two-sided p value of each difference."""
    if not found:
        return []
    from scipy import special  # not for a table of single runs: it takes a quarter of a second

    statistics = [math.inf if one.mean and not one.error else abs(one.mean) / (one.error or 1.0) for one in found]
    chances = special.stdtr([one.freedom for one in found], [-size for size in statistics])
    return [2 * chance for chance in chances.tolist()]


def _quantile(freedom: float, share: float) -> float:
    """Of Student's t."""
    from scipy import special

    return float(special.stdtrit(freedom, share))


def _caution(freedom: float) -> float:
    """From an estimated standard deviation to one that the true one exceeds with a chance of 20 % only."""
    from scipy import special

    return math.sqrt(freedom / float(special.chdtri(freedom, 0.8)))


def _detectable(error: float, freedom: float, level: float) -> float:
    """The smallest difference, as a share, that a two-sided t test sees with a chance of :data:`POWER`.

    By the noncentral t distribution, whose parameter is the true difference over the standard error.
    """
    from scipy import special

    critical = _quantile(freedom, 1 - level / 2)
    return _share(error * float(special.nctdtrinc(freedom, 1 - POWER, critical)))


def _share(log: float) -> float:
    """How much larger a figure is than another, by the logarithm of their ratio; at most what a float can hold."""
    return math.expm1(min(log, 700.0))
