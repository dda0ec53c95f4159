"""How many times longer one thing takes than another, with its interval, where they take turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


def by_turns(
    sides: Mapping[str, Callable[[], T]], turns: int, device: torch.device
) -> dict[str, list[tuple[float, T]]]:
    """Time each side once in every turn, in every order; return seconds until the device has ended, and its results."""
    orders, steps = [*permutations(sides)], {side: list[tuple[float, T]]() for side in sides}
    for turn in range(turns):
        for side in orders[turn % len(orders)]:
            started = time.perf_counter()
            result = sides[side]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            steps[side].append((time.perf_counter() - started, result))
    return steps


@dataclass(frozen=True)
class Ratio:
    """How many times longer one thing takes than another, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} (95 % interval {self.low:.4f} to {self.high:.4f})"


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
