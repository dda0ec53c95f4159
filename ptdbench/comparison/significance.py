"""Significance of differences between configurations: verdicts, ranks, intervals, and the detectable difference.

Over several pairs the level holds for all of them together (S. Holm, "A simple sequentially rejective multiple test
procedure", Scandinavian Journal of Statistics 6, 1979). The range of ranks that follows holds for all ranks together
(D. Al Mohamad, J. Goeman and E. van Zwet, "Simultaneous confidence intervals for ranks", Biometrics 78, 2022).

``make compare-truth`` measures how often that finds a difference where there is none, and where there is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from ptdbench.comparison.variation import MIN_RUNS, Difference, Pool, Sample

#: The chance to see any difference where there is none.
LEVEL = 0.05

#: The chance with which a difference of the :attr:`Comparison.detectable` size is seen.
POWER = 0.9


@dataclass(frozen=True)
class Comparison:
    """One configuration against another."""

    ratio: float  #: Its figure over the other's, by their geometric means.
    low: float  #: Lower end of the interval of the ratio.
    high: float  #: Upper end.
    runs: int  #: Pairs of runs, or runs of the side that has fewer.
    is_paired: bool  #: Whether runs of the same block were compared.
    #: The smallest difference, as a share, that would have been seen with a chance of :data:`POWER`, also among as many
    #: pairs as are compared. How much runs vary is itself an estimate: its upper limit is used.
    detectable: float


def compare(found: Difference, level: float = LEVEL, pairs: int = 1) -> Comparison:
    """Return the interval of a difference, which has the ratio with a chance of ``1 - level``, and what it would show.

    So many ``pairs`` are compared by :func:`differing`: each has to show more than if it were alone.
    """
    margin = found.error * _quantile(found.freedom, 1 - level / 2)
    return Comparison(
        ratio=math.exp(found.mean),
        low=math.exp(found.mean - margin),
        high=1 + _share(found.mean + margin),
        runs=found.runs,
        is_paired=found.is_paired,
        detectable=_detectable(found.error * _caution(found.freedom), found.freedom, level / pairs),
    )


def margin(pool: Pool, sample: Sample) -> float | None:
    """Return how far the interval of a configuration's geometric mean reaches upwards, as a share.

    It has what other runs of the same sweep would give; on another day the machine may be another one. ``None`` with
    less than :data:`ptdbench.comparison.variation.MIN_RUNS` runs.
    """
    found = pool.mean_error(sample)
    if found is None:
        return None
    error, freedom = found
    return _share(error * _quantile(freedom, 1 - LEVEL / 2))


def faster(pool: Pool, samples: Sequence[Sample], level: float = LEVEL) -> list[set[int]]:
    """Return for each configuration of a pool the places of those that are known to have the larger figure.

    The chance that any of them is said to have it that does not is at most ``level``, for all pairs together.
    """
    found: list[set[int]] = [set() for _ in samples]
    judged = [place for place, sample in enumerate(samples) if pool.is_enough(sample)]
    pairs = list(combinations(judged, 2))
    signs = differing([pool.difference(samples[one], samples[other]) for one, other in pairs], level)
    for (one, other), sign in zip(pairs, signs, strict=True):
        if sign:
            winner, loser = (one, other) if sign > 0 else (other, one)
            found[loser].add(winner)
    return found


def ranks(faster: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Return the best and the worst rank that each configuration may have, 1 that of the largest figure.

    The chance that any of the true ranks lies outside is at most the level of :func:`faster`. A configuration that
    differs from no other has the range ``(1, len(faster))``.
    """
    slower = Counter(chain.from_iterable(faster))
    return [(1 + len(winners), len(faster) - slower[place]) for place, winners in enumerate(faster)]


def differing(found: Sequence[Difference | None], level: float = LEVEL) -> list[int]:
    """Compare all pairs: 1 where the first is larger, -1 where the second is, 0 where nothing is seen or known.

    The chance that any of them is said to differ that does not is at most ``level``, for all pairs together.
    """
    known = [one for one in found if one]
    adjusted = iter(holm(p_values(known)))
    return [(1 if one.mean > 0 else -1) if one and next(adjusted) <= level else 0 for one in found]


def chance_of_failures(was: int, before: int, now: int, after: int) -> float:
    """Return the chance of at least ``now`` failures of ``after`` runs, with ``was`` of ``before`` ahead of a change.

    The change has no effect; by Fisher's exact test, one-sided.
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


def interim_looks(most: int) -> list[int]:
    """Return after how many blocks of repeats ``repeat=auto`` checks whether it may stop, the last being ``most``.

    They lie so far apart that the next one knows more, and are so few that each has a fair share of the level.
    """
    found = [most]
    while (earlier := int(found[0] / 1.6)) >= MIN_RUNS:
        found.insert(0, earlier)
    return found


def level_of_look(most: int) -> float:
    """The level at each of :func:`interim_looks`: together they have :data:`LEVEL`, by Bonferroni's inequality."""
    return LEVEL / len(interim_looks(most))


def p_values(found: Sequence[Difference]) -> list[float]:
    """Return the two-sided p value of each difference."""
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
    """Return a ratio minus 1, by its logarithm; at most what a float can hold."""
    return math.expm1(min(log, 700.0))
