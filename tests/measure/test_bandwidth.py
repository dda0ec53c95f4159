"""Bandwidths by the definitions of nccl-tests, and the line through time over size."""

import math
import random
import statistics

import pytest

from ptdbench.measure.bandwidth import FACTORS, bus_bandwidth, fit

#: The factors of doc/PERFORMANCE.md worked out by hand.
_PARTS, _WHOLE = {2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875}, {2: 1, 3: 1, 4: 1, 8: 1}
WORKED = {
    "all_reduce": {2: 1, 3: 4 / 3, 4: 1.5, 8: 1.75}, "broadcast": _WHOLE, "reduce": _WHOLE,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), _PARTS),
}  # fmt: skip


@pytest.mark.parametrize("op", FACTORS)
def test_bus_bandwidth_of_worked_examples(op):
    # 12 MB in 3 ms: an algorithm bandwidth of 4 GB/s.
    rates = {ranks: bus_bandwidth(op, 12_000_000, 0.003, ranks) for ranks in (2, 3, 4, 8)}
    assert rates == pytest.approx({ranks: 4e9 * factor for ranks, factor in WORKED[op].items()})


SIZES = [8 * 4**power for power in range(13)]


def test_a_line_is_found_exactly_and_small_messages_count_as_much():
    line = fit(SIZES, [2e-5 + 3e-10 * size for size in SIZES])
    assert (line.alpha, line.beta) == (pytest.approx(2e-5), pytest.approx(3e-10))
    assert line.max_relative_error < 1e-9
    assert line.r2 == pytest.approx(1)
    assert line.points == 13
    # The largest message is 10 % off; without weights its error alone would move alpha by far more than alpha.
    times = [2e-5 + 3e-10 * size for size in SIZES]
    times[-1] *= 1.1
    assert fit(SIZES, times).alpha == pytest.approx(2e-5, rel=0.05)


def test_standard_errors_and_what_is_no_line_show():
    """Over many draws of 2 % noise, estimates scatter as widely as their standard errors say."""
    draw = random.Random(1)
    lines = [fit(SIZES, [(2e-5 + 3e-10 * size) * draw.gauss(1, 0.02) for size in SIZES]) for _ in range(400)]
    for name in ("alpha", "beta"):
        scatter = statistics.stdev(getattr(line, name) for line in lines)
        assert statistics.fmean(getattr(line, f"{name}_error") for line in lines) == pytest.approx(scatter, rel=0.2)
    line = fit([1, 1000, 1_000_000], [1e-5, 1e-3, 1.1e-5])
    assert line.max_relative_error > 0.3
    assert line.r2 < 0.9
    assert [fit(sizes, [1.0] * len(sizes)) for sizes in ([], [8], [8, 16], [8, 8, 16])] == [None] * 4
    line = fit([8, 16, 32], [1.0] * 3)
    assert (line.alpha, math.isnan(line.r2)) == (pytest.approx(1), True)
