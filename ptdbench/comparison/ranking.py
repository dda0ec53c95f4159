"""The alternatives of a group, fastest first, and the certainty of their order, in the words of all tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptdbench.comparison import noise, significance, variation
from ptdbench.comparison.alternatives import Alternative, comparable
from ptdbench.comparison.significance import LEVEL, POWER, Comparison, level_of_look
from ptdbench.comparison.variation import Noise, Pool
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Degree
from ptdbench.terminal import plural

#: Shares above this are not shown as figures.
_MOST = 1.0

_WIDE = f"±>{_MOST:.0%}"


def level_of(runs: Iterable[RunRecord]) -> float:
    """Return the significance level for runs: smaller if ``repeat=auto`` has looked at them several times."""
    examined = [run for run in runs if run.option("repeat.runs", str) == "auto"]
    most = [blocks for run in examined if (blocks := run.option("repeat.max", Degree))]
    return level_of_look(max(most)) if most else LEVEL


def margin_text(margin: float | None) -> str:
    """Return the text after a figure: `` ±1.8%``, or empty if unknown."""
    if margin is None:
        return ""
    return f" ±{margin:.1%}" if margin <= _MOST else f" {_WIDE}"


def interval_text(comparison: Comparison | None, decimals: int) -> str:
    """Return the text after a ratio: `` (0.63-0.67)``, or empty if unknown."""
    if comparison is None:
        return ""
    if comparison.high / comparison.ratio - 1 > _MOST:
        return f" ({_WIDE})"
    return f" ({comparison.low:.{decimals}f}-{comparison.high:.{decimals}f})"


def share_text(share: float) -> str:
    """Return ``3.1%``, or ``2x and more``."""
    return f"{share:.1%}" if share <= _MOST else f"{1 + _MOST:.0f}x and more"


def ratio_text(share: float) -> str:
    """Return ``1.2x`` or ``1.031x``, with two digits of the excess over 1; ``no 2x`` if even 2x is not resolved."""
    if share > _MOST:
        return f"no {1 + _MOST:.0f}x"
    decimals = 1 - math.floor(math.log10(share)) if 0 < share < 0.1 else 2
    return f"{1 + share:.{decimals}f}x"


def detectable_text(detectable: float) -> str:
    """Return ``3.1% detectable (90% power)``."""
    return f"{share_text(detectable)} detectable ({POWER:.0%} power)"


@dataclass(frozen=True)
class Standing:
    """The standing of an alternative in a ranking."""

    alternative: Alternative  #: The alternative.
    rank: tuple[int, int] | None = None  #: The best and the worst rank that it may have; ``None`` if no run is ok.
    rate: float | None = None  #: Tokens or samples per second, geometric mean over runs.
    #: Upper half-width of the rate's confidence interval, as a share; ``None`` with fewer than
    #: :data:`ptdbench.comparison.variation.MIN_RUNS` runs.
    margin: float | None = None
    ratio: float | None = None  #: Its rate over the first place's; ``None`` if it has no rate.
    against_best: Comparison | None = None  #: The same ratio with its interval, if there are enough runs.
    number: int | None = None  #: Its number among those with a rank.
    faster: Collection[int] = ()  #: The numbers of alternatives that are significantly faster.

    def is_behind(self, other: Standing) -> bool:
        """Return whether it is significantly slower than the other, possible even if their ranks overlap."""
        return other.number in self.faster


@dataclass(frozen=True)
class Ranking:
    """A ranking of alternatives, fastest first; those without a run that is ok come last."""

    places: list[Standing]  #: One for each alternative.
    earlier: Noise | None  #: Noise of earlier sweeps on the same machine.

    @property
    def is_known(self) -> bool:
        """Whether any comparison with the first place is possible."""
        return any(place.against_best for place in self.places)


def rank(alternatives: Sequence[Alternative], earlier: Noise | None = None) -> Ranking:
    """Rank comparable alternatives; an order of single runs requires the noise of earlier sweeps."""
    level = level_of(run for alternative in alternatives for run in alternative.runs)
    ok = [alternative for alternative in alternatives if alternative.sample]
    samples = [alternative.sample for alternative in ok]
    means, pool = [variation.geometric_mean(sample) or 0.0 for sample in samples], Pool(samples, earlier)
    faster = significance.faster(pool, samples, level)
    ranks = significance.ranks(faster)
    order = list(_in_order(faster, means))
    places = []
    for number in order:
        difference = pool.difference(samples[number], samples[order[0]]) if number != order[0] else None
        comparison = significance.compare(difference, level, pairs=math.comb(len(ok), 2)) if difference else None
        places.append(Standing(
            alternative=ok[number],
            rank=ranks[number],
            rate=means[number],
            margin=significance.margin(pool, samples[number], level),
            ratio=comparison.ratio if comparison else means[number] / means[order[0]],  # the former by common blocks
            against_best=comparison,
            number=number,
            faster=faster[number],
        ))  # fmt: skip
    return Ranking([*places, *(Standing(failed) for failed in alternatives if not failed.sample)], earlier)


def of_models(alternatives: Iterable[Alternative]) -> list[Ranking]:
    """Rank each group of :func:`ptdbench.comparison.alternatives.comparable` separately."""
    return [
        rank(group, noise.look_up(run for alternative in group for run in alternative.runs))
        for group in comparable(alternatives)
    ]


def _in_order(faster: Sequence[set[int]], means: Sequence[float]) -> Iterator[int]:
    """Order by means, but none before a significantly faster one, whose mean may suffer from a busier machine."""
    waiting = sorted(range(len(means)), key=lambda number: -means[number])
    behind = [len(winners) for winners in faster]  # how many significantly faster ones are still waiting
    while waiting:
        number = min(waiting, key=behind.__getitem__)  # none, unless pairs of different blocks form a circle
        waiting.remove(number)
        for other in waiting:
            behind[other] -= number in faster[other]
        yield number


def remark(ranking: Ranking) -> str | None:
    """Summarize the certainty of the order in one line; ``None`` for a single place."""
    ranked = [place for place in ranking.places if place.rank]
    if len(ranked) < 2:
        return None
    counts = [len(place.alternative.sample) for place in ranked]
    each = f"{_runs(min(counts), max(counts))} each"
    comparisons = [place.against_best for place in ranked if place.against_best]  # none if the first has too few runs
    if not comparisons and not any(place.faster for place in ranked):
        return f"{each}: not ranked; repeat=5 ranks them"
    resolve = "resolves" if max(counts) == 1 else "resolve"
    remarks = [f"ranks: simultaneous {1 - LEVEL:.0%} confidence"]
    detectable = max((comparison.detectable for comparison in comparisons), default=None)
    remarks.append(each if detectable is None else f"{each} {resolve} {ratio_text(detectable)}")
    if min(counts) == 1 < max(counts):
        remarks.append(f"single runs: {'ranked by the variation of the others' if ranking.earlier else 'no rank'}")
    elif max(counts) == 1 and ranking.earlier:
        earlier = share_text(math.expm1(min(ranking.earlier.unpaired.deviation, 700)))
        remarks.append(f"ranked by the run-to-run variation of earlier sweeps, {earlier}")
    return "; ".join(remarks)


def _runs(fewest: int, most: int) -> str:
    """Return ``one run``, ``5 runs`` or ``1 to 5 runs``."""
    if fewest < most:
        return f"{fewest} to {most} runs"
    return "one run" if most == 1 else plural(most, "run")
