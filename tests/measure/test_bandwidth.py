"""Bandwidths by the definitions of nccl-tests, the line through time over size, and lines that are kept."""

import json
import math
import random
import statistics
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from ptdbench.launch.peers import Peer
from ptdbench.measure import bandwidth
from ptdbench.measure.bandwidth import FACTORS, bus_bandwidth, fit

pytestmark = pytest.mark.usefixtures("cache")


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


LINE = bandwidth.Line(1e-3, 1e-9, 2**20)
SLOWER = replace(LINE, alpha=2e-3)


def peer(rank: int, host: str = "a", device: str = "cpu") -> Peer:
    return Peer(rank, rank, 2, host, host, device, cores=[], threads=1, settings={})


KEY = bandwidth.fits_key("gloo", [peer(0), peer(1)])


def fitted(operation: str, dtype: str = "fp32", calls: float = 2, size: float = 1e6, of: Any = KEY) -> float | None:
    return bandwidth.fitted_seconds(of, operation, dtype, calls, size)


def test_calls_and_bytes_take_alpha_and_beta_up_to_the_size_that_was_fitted():
    assert fitted("all_gather") is None
    bandwidth.keep_fits(KEY, {"all_gather fp32": LINE})
    assert fitted("all_gather", calls=2, size=1e6) == pytest.approx(2e-3 + 1e-3)
    assert fitted("all_to_all") is None
    assert fitted("all_gather", calls=3, size=3 * 2**20) is not None
    assert fitted("all_gather", calls=3, size=3 * 2**20 + 1) is None
    assert fitted("all_gather", calls=0, size=0) is None


def test_sums_are_of_one_dtype_and_copies_of_any():
    lines = {"all_reduce bf16 max": LINE, "all_gather fp32": LINE, "all_reduce fp32 sum": LINE}
    bandwidth.keep_fits(KEY, {"all_reduce fp32 sum": SLOWER, **lines})
    assert fitted("all_reduce", calls=1, size=1e6) == pytest.approx(2e-3)  # asynchronous, as in training
    assert fitted("all_reduce", "bf16") is None
    assert fitted("all_gather", "bf16") is not None


def test_any_difference_makes_it_another(monkeypatch):
    bandwidth.keep_fits(KEY, {"all_gather fp32": LINE})
    ranks = ([peer(0)], [peer(0), peer(1, host="b")], [peer(0), peer(1, device="cuda:0 H200")])
    others = [bandwidth.fits_key("nccl", [peer(0), peer(1)]), *(bandwidth.fits_key("gloo", of) for of in ranks)]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    others.append(bandwidth.fits_key("gloo", [peer(0), peer(1)]))
    for other in (*others, KEY | {"torch": "1.0"}):
        assert fitted("all_gather", of=other) is None


def test_the_newest_line_counts_unless_no_time_follows_it_or_its_sizes_are_smaller_and_other_series_stay():
    bandwidth.keep_fits(KEY, {"all_gather fp32": SLOWER, "broadcast fp32": LINE})
    bandwidth.keep_fits(KEY, {"all_gather fp32": LINE})
    for worse in ({"alpha": -1e-3}, {"beta": -1e-9}, {"beta": 0.0}, {"largest": 2**10}):
        bandwidth.keep_fits(KEY, {"all_gather fp32": replace(SLOWER, **worse)})
        assert fitted("all_gather", calls=1, size=1e6) == fitted("broadcast", calls=1, size=1e6) == pytest.approx(2e-3)


@pytest.mark.parametrize("line", [{}, None, [1], {**asdict(LINE), "beta": "fast"}])
def test_a_line_that_is_damaged_is_none(line):
    path = bandwidth.keep_fits(KEY, {"broadcast fp32": LINE})
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "lines": {**kept["lines"], "all_gather fp32": line}}))
    assert fitted("all_gather") is None
    assert fitted("broadcast") is not None
    path.write_text(json.dumps({**kept, "lines": line}))
    assert fitted("broadcast") is None
