"""Bandwidths by the definitions of nccl-tests, and the line through time over size."""

from __future__ import annotations

import random
import statistics

import pytest

from ptdbench.measure.bandwidth import FACTORS, algorithm_bandwidth, bus_bandwidth, fit


def test_algorithm_bandwidth_is_size_over_time():
    assert algorithm_bandwidth(1_000_000, 0.5) == 2_000_000


#: The factors of doc/PERFORMANCE.md worked out by hand.
_PARTS, _WHOLE = {2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875}, {2: 1, 3: 1, 4: 1, 8: 1}
WORKED = {
    "all_reduce": {2: 1, 3: 4 / 3, 4: 1.5, 8: 1.75}, "broadcast": _WHOLE, "reduce": _WHOLE,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), _PARTS),
}  # fmt: skip


@pytest.mark.parametrize(("op", "ranks"), [(op, ranks) for op in WORKED for ranks in WORKED[op]])
def test_bus_bandwidth_of_worked_examples(op, ranks):
    # 12 MB in 3 ms: an algorithm bandwidth of 4 GB/s.
    assert bus_bandwidth(op, 12_000_000, 0.003, ranks) == pytest.approx(4e9 * WORKED[op][ranks])


def test_every_factor_has_an_example_and_a_barrier_has_no_bandwidth():
    assert set(FACTORS) == set(WORKED)
    with pytest.raises(KeyError):
        bus_bandwidth("barrier", 1, 1.0, 2)


def test_a_ring_all_reduce_runs_at_its_links_bandwidth():
    """n - 1 steps of reduce-scatter and as many of all-gather, each over a link of 10 GB/s with an n-th of the data."""
    for ranks in (2, 3, 4, 8, 64):
        seconds = 2 * (ranks - 1) * (48_000_000 / ranks) / 10e9
        assert bus_bandwidth("all_reduce", 48_000_000, seconds, ranks) == pytest.approx(10e9)


SIZES = [8 * 4**power for power in range(13)]


def test_a_line_is_found_exactly():
    line = fit(SIZES, [2e-5 + 3e-10 * size for size in SIZES])
    assert (line.alpha, line.beta) == (pytest.approx(2e-5), pytest.approx(3e-10))
    assert line.max_relative_error < 1e-9
    assert line.r2 == pytest.approx(1)
    assert line.points == 13
    assert line.seconds(10**6) == pytest.approx(3.2e-4)


def test_small_messages_count_as_much_as_large_ones():
    """The largest message is 10 % off; without weights its error alone would move alpha by far more than alpha."""
    times = [2e-5 + 3e-10 * size for size in SIZES]
    times[-1] *= 1.1
    assert fit(SIZES, times).alpha == pytest.approx(2e-5, rel=0.05)


def test_standard_errors_tell_how_far_the_line_may_be_off():
    """Over many draws of 2 % noise, estimates scatter as widely as their standard errors say."""
    draw = random.Random(1)
    lines = [fit(SIZES, [(2e-5 + 3e-10 * size) * draw.gauss(1, 0.02) for size in SIZES]) for _ in range(400)]
    for name in ("alpha", "beta"):
        scatter = statistics.stdev(getattr(line, name) for line in lines)
        assert statistics.fmean(getattr(line, f"{name}_error") for line in lines) == pytest.approx(scatter, rel=0.2)


def test_what_is_not_a_line_shows():
    line = fit([1, 1000, 1_000_000], [1e-5, 1e-3, 1.1e-5])
    assert line.max_relative_error > 0.3
    assert line.r2 < 0.9


def test_fewer_than_three_sizes_make_no_line_and_equal_times_have_no_variance_to_explain():
    assert [fit(sizes, [1e-5] * len(sizes)) for sizes in ([], [8], [8, 16], [8, 8, 16])] == [None] * 4
    line = fit([8, 16, 32], [1e-5] * 3)
    assert line.alpha == pytest.approx(1e-5)
    assert line.max_relative_error < 1e-9
