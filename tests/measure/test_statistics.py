import random
import statistics

import pytest
import torch

from benchmarks.ratio import by_turns, paired_ratio
from ptdbench.measure.results import StepSeconds
from ptdbench.measure.timing import median_interval, summary, warmup_end, warmup_ends


def mser_by_definition(values: list[float]) -> int:
    """White's rule written out: the first d of the first half with the least squared standard error."""

    def squared_standard_error(d: int) -> float:
        rest = values[d:]
        mean = statistics.fmean(rest)
        return sum((value - mean) ** 2 for value in rest) / len(rest) ** 2

    return min(range(len(values) // 2 + 1), key=squared_standard_error)


@pytest.mark.parametrize("seed", range(20))
def test_warmup_follows_the_definition(seed):
    draw = random.Random(seed)
    slow = [draw.uniform(2, 5) for _ in range(draw.randrange(6))]
    values = slow + [draw.gauss(1, 0.1) for _ in range(draw.randrange(8, 40))]
    assert warmup_end(values, minimum=0) == mser_by_definition(values)


@pytest.mark.parametrize(("values", "minimum", "expected"), [
    ([], 3, 0), ([1.0], 3, 0), ([5.0, 1.0], 0, 1),
    ([1.0] * 10, 0, 0),  # nothing to gain
    ([1.0] * 10, 3, 3),
    ([1.0] * 10, 8, 5),  # never more than half
    (list(range(10, 0, -1)), 0, 5),  # still settling at the end
    ([0.1234567] * 1001, 0, 0),  # does not hang on rounding
    ([9.0, 4.0, 2.0, *[1.0, 1.1] * 10], 0, 3),
])  # fmt: skip
def test_warmup_bounds(values, minimum, expected):
    assert warmup_end(values, minimum) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([1], [0]), ([0, 1], [0, 0]), ([100, 1], [3, 1]), ([2, 100, 4], [2, 3, 3]), ([1, 2], [0, 1]), ([3, 4], [3, 3])],
)
def test_short_start_beside_others_is_all_warmup(lengths, expected):
    """It compiles in its first step; where nothing else would be left, half of it counts."""
    assert warmup_ends([[9.0, *[1.0] * length][:length] for length in lengths], 3) == expected


def test_summary_by_hand():
    seconds = summary([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (seconds.median, seconds.mean, seconds.ci95) == (3.0, 3.0, None)
    assert (seconds.p5, seconds.p95) == pytest.approx((1.2, 4.8))
    assert summary([]) == StepSeconds()


@pytest.mark.parametrize(
    # ranks from the usual table of order-statistic intervals of the median
    ("count", "expected"),
    [(0, None), (5, None), (6, [1, 6]), (8, [1, 8]), (9, [2, 8]), (10, [2, 9]), (20, [6, 15]), (100, [40, 61])],
)
def test_median_interval_ranks(count, expected):
    assert median_interval(range(count, 0, -1)) == expected


def test_sides_take_turns_and_each_is_the_first_as_often():
    order = []
    steps = by_turns({"a": lambda: order.append("a"), "b": lambda: len(order)}, 3, torch.device("cpu"))
    assert order == ["a"] * 3
    assert [result for _, result in steps["b"]] == [1, 1, 3]  # before the second one of a, and after the others
    assert all(seconds > 0 for seconds, _ in steps["a"] + steps["b"])


def test_paired_ratio_is_exact_and_counts_rare_costs():
    base = [1.0, 2.0, 4.0, 3.0]
    ratio = paired_ratio([1.5 * seconds for seconds in base], base)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    base = [1.0] * 100
    ratio = paired_ratio([2.0 if step % 10 == 0 else 1.0 for step in range(100)], base)
    assert ratio.value == pytest.approx(1.1)
    assert 1.03 < ratio.low < 1.1 < ratio.high < 1.17


def test_paired_ratio_interval_matches_the_normal_one():
    """For many mild timings the bootstrap agrees with mean ± 1.96 standard errors."""
    draw = random.Random(1)
    a = [draw.gauss(1.05, 0.05) for _ in range(400)]
    ratio = paired_ratio(a, [1.0] * 400)
    half = 1.96 * statistics.stdev(a) / 400**0.5
    assert ratio.low == pytest.approx(statistics.fmean(a) - half, abs=half / 10)
    assert ratio.high == pytest.approx(statistics.fmean(a) + half, abs=half / 10)
    assert ratio == paired_ratio(a, [1.0] * 400)


def test_paired_ratio_refuses_what_is_not_paired():
    with pytest.raises(ValueError, match="3 against 2"):
        paired_ratio([1.0, 1.0, 1.0], [1.0, 1.0])
