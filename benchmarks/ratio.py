"""How many times longer one thing takes than another, with its interval, and the product held against a bare loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from benchmarks.script import judged, keep
from ptdbench.measure.timing import median_interval


@dataclass(frozen=True)
class Ratio:
    """How many times longer one thing takes than another, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} (95 % interval {self.low:.4f} to {self.high:.4f})"


#: Of the seconds of two things: either a ratio of totals or one of medians.
RatioOf = Callable[[Sequence[float], Sequence[float]], Ratio]


def median_of_ratios(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return the median of ``a[i] / b[i]``, paired seconds, with the order-statistic interval of a median.

    For figures that are medians themselves: a pair that something else disturbed is one pair, however long it took.
    """
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    low, high = median_interval(ratios) or (0.0, math.inf)
    return Ratio(float(np.median(ratios)), low, high)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return the total time of ``a`` over that of ``b``, where ``a[i]`` and ``b[i]`` were timed side by side.

    Totals and not medians, because a cost that falls on every tenth step only is a cost. The interval is a
    percentile bootstrap over pairs (4000 resamples from a fixed seed, so that it is the same for the same
    timings); pairs are drawn whole, which keeps what slowed both of them down out of the ratio.

    Raises:
        ValueError: The lists differ in length or have fewer than two pairs.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"paired timings must come in two pairs or more: {len(a)} against {len(b)}")
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    generator = np.random.default_rng(0)
    draws = (generator.integers(len(left), size=len(left)) for _ in range(4000))
    resampled = [left[draw].sum() / right[draw].sum() for draw in draws]
    low, high = np.quantile(resampled, (0.025, 0.975)).tolist()
    return Ratio(float(left.sum() / right.sum()), low, high)


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return the median of ``a`` over that of ``b``, which need not be paired, with a percentile bootstrap."""
    generator = np.random.default_rng(0)

    def resampled(values: Sequence[float]) -> float:
        return float(np.median(generator.choice(values, len(values))))

    low, high = np.quantile([resampled(a) / resampled(b) for _ in range(4000)], (0.025, 0.975)).tolist()
    return Ratio(float(np.median(a) / np.median(b)), low, high)


#: The product, and twice what one would write by hand: its ratio to itself shows what this machine can resolve.
SIDES = ("product", "bare", "again")

#: Every order of the three sides.
ORDERS = list(permutations(SIDES))


def in_turns(sides: Mapping[str, Callable[[], float]], turns: int, warmup: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each side in so many turns after the warm-up, in which each is equally often the first.

    Args:
        sides: For each of the :data:`SIDES` what takes one turn of it, and returns its seconds.
        turns: How many are kept.
        warmup: How many come before them.
    """
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(warmup + turns):
        for side in ORDERS[turn % len(ORDERS)]:
            seconds[side].append(sides[side]())
    return {side: of_turns[warmup:] for side, of_turns in seconds.items()}


def against_bare(
    seconds: Mapping[str, Sequence[float]], ratio_of: RatioOf, rule: str, holds: Callable[[Ratio], bool], name: str
) -> bool:
    """Print the ratios of the product and of a second bare loop to a bare one, and return whether the first one holds.

    Args:
        seconds: Of each of the :data:`SIDES`.
        ratio_of: One of the functions above.
        rule: What is required of the ratio.
        holds: Whether that is so.
        name: Of the figure in ``results.json``.
    """
    noise, ratio = (ratio_of(seconds[side], seconds["bare"]) for side in ("again", "product"))
    print(f"  bare / bare     {noise}")
    passed = judged(f"  product / bare  {ratio}", rule, holds(ratio))
    keep(name, str(ratio))
    if not (passed or holds(noise)):
        print("  bare against bare misses it too: this machine is too busy; measure for longer")
    return passed


def within(limit: float) -> tuple[str, Callable[[Ratio], bool]]:
    """Require that the whole interval lies so near to 1: the rule, and whether it holds."""
    return f"within {limit:.0%}", lambda ratio: max(abs(ratio.low - 1), abs(ratio.high - 1)) <= limit
