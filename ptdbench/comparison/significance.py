"""Significance of differences between configurations: verdicts, ranks, intervals, and the detectable difference.

With several pairs, the level is family-wise (S. Holm, "A simple sequentially rejective multiple test procedure",
Scandinavian Journal of Statistics 6, 1979). The resulting ranges of ranks hold simultaneously (D. Al Mohamad,
J. Goeman and E. van Zwet, "Simultaneous confidence intervals for ranks", Biometrics 78, 2022).

``make ranks-truth`` measures the rates of false positives and detections.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from ptdbench.comparison.variation import LEAST_RUNS, MIN_RUNS, Difference, Pool, Sample

#: The probability of any false positive.
LEVEL = 0.05

#: The probability of detecting a difference of :attr:`Comparison.detectable`.
POWER = 0.9

#: The critical value above which the normal part of noncentral t is neglected: there SciPy's quantile hangs.
_WIDE = 100.0


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
    :data:`ptdbench.comparison.variation.MIN_RUNS` runs.
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
    """Return the smallest difference, as a share, that a two-sided t test detects with probability :data:`POWER`.

    By the noncentral t distribution; its parameter is the true difference over the standard error.
    """
    from scipy import special

    critical = _quantile(freedom, 1 - level / 2)
    if critical > _WIDE:
        return _share(error * critical * math.sqrt(float(special.chdtri(freedom, 1 - POWER)) / freedom))
    return _share(error * float(special.nctdtrinc(freedom, 1 - POWER, critical)))


def _share(log: float) -> float:
    """Return a ratio minus 1 from its logarithm, limited to the range of floats."""
    return math.expm1(min(log, 700.0))
