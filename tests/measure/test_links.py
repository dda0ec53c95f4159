"""Fitted lines that are kept: found again for exactly the same ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ptdbench.launch.peers import Peer
from ptdbench.measure import bandwidth

LINE = {"alpha": 1e-3, "beta": 1e-9, "largest": 2**20}
SLOWER = LINE | {"alpha": 2e-3}


def peer(rank: int, host: str = "a", device: str = "cpu") -> Peer:
    return Peer(rank, rank, 2, host, host, device, cores=[], threads=1, settings={})


KEY = bandwidth.fits_key("gloo", [peer(0), peer(1)])


pytestmark = pytest.mark.usefixtures("cache")


def fitted(operation: str, dtype: str = "fp32", calls: float = 2, size: float = 1e6, of: Any = KEY) -> float | None:
    return bandwidth.fitted_seconds(of, operation, dtype, calls, size)


def test_calls_and_bytes_take_alpha_and_beta():
    assert fitted("all_gather") is None
    bandwidth.keep_fits(KEY, {"all_gather fp32 blocking": LINE})
    assert fitted("all_gather", calls=2, size=1e6) == pytest.approx(2e-3 + 1e-3)
    assert fitted("all_to_all") is None


def test_sums_are_of_one_dtype_and_copies_of_any():
    lines = {"all_reduce bf16 max async": LINE, "all_gather fp32 async": LINE, "all_reduce fp32 sum async": LINE}
    bandwidth.keep_fits(KEY, {"all_reduce fp32 sum blocking": SLOWER, **lines})
    assert fitted("all_reduce", calls=1, size=1e6) == pytest.approx(2e-3)  # asynchronous, as in training
    assert fitted("all_reduce", "bf16") is None
    assert fitted("all_gather", "bf16") is not None


def test_a_line_does_not_reach_beyond_what_it_was_fitted_to():
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": LINE})
    assert fitted("all_gather", calls=3, size=3 * 2**20) is not None
    assert fitted("all_gather", calls=3, size=3 * 2**20 + 1) is None
    assert fitted("all_gather", calls=0, size=0) is None


def test_the_newest_line_of_a_series_counts_and_others_stay():
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": SLOWER, "broadcast fp32 async": LINE})
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": LINE})
    assert fitted("all_gather", calls=1, size=1e6) == fitted("broadcast", calls=1, size=1e6) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    "other",
    [
        bandwidth.fits_key("nccl", [peer(0), peer(1)]),
        bandwidth.fits_key("gloo", [peer(0), peer(1), peer(2)]),
        bandwidth.fits_key("gloo", [peer(0), peer(1, host="b")]),
        bandwidth.fits_key("gloo", [peer(0), peer(1, device="cuda:0 H200")]),
        KEY | {"torch": "1.0"},
    ],
)
def test_any_difference_makes_it_another(other):
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": LINE})
    assert fitted("all_gather", of=other) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"lines": null}'])
def test_a_broken_file_is_no_line(text):
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": LINE}).write_text(text)
    assert fitted("all_gather") is None


@pytest.mark.parametrize("worse", [{"alpha": -1e-3}, {"beta": -1e-9}, {"beta": 0.0}, {"largest": 2**10}])
def test_a_line_that_no_time_follows_or_of_smaller_sizes_takes_no_place(worse):
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": LINE})
    bandwidth.keep_fits(KEY, {"all_gather fp32 async": SLOWER | worse, "broadcast fp32 async": LINE})
    assert fitted("all_gather", calls=1, size=1e6) == pytest.approx(2e-3)


@pytest.mark.parametrize("line", [{}, None, [1], {**LINE, "beta": "fast"}])
def test_a_line_that_is_damaged_is_none(line):
    path = bandwidth.keep_fits(KEY, {"broadcast fp32 async": LINE})
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "lines": {**kept["lines"], "all_gather fp32 async": line}}))
    assert fitted("all_gather") is None
    assert fitted("broadcast") is not None
