"""The verdict, from figures that are given: what is named, and what is not."""

from __future__ import annotations

import pytest
from msgspec.structs import asdict

from ptdbench.measure import soundness

GPU = {
    "clock_reasons": ["power cap"], "temperature_celsius": 60, "processes": 1, "power_limit_watts": 700.0,
    "power_limit_default_watts": 700.0, "near_cores": [0, 1, 2, 3],
}  # fmt: skip


def slow(rates, tolerance=0.05, peers=None):
    return soundness.slow(rates, peers or dict.fromkeys(rates, "all"), tolerance)


class TestSlow:
    def test_below_the_median_of_the_others(self):
        assert slow({0: 100.0, 1: 100.0, 2: 94.0, 3: 100.0}) == {2: pytest.approx(0.94)}

    def test_within_the_tolerance(self):
        assert slow({0: 100.0, 1: 96.0, 2: 95.0, 3: 100.0}) == {}

    def test_of_two_the_slower(self):
        assert slow({0: 100.0, 1: 90.0}) == {1: pytest.approx(0.9)}

    def test_faster_than_all_is_no_fault(self):
        assert slow({0: 100.0, 1: 100.0, 2: 300.0}) == {}

    def test_one_alone_has_no_peers(self):
        assert slow({0: 1.0}) == {}

    def test_only_peers_count(self):
        rates = {"a": 900.0, "b": 890.0, "c": 20.0, "d": 10.0}
        assert slow(rates, peers={"a": "near", "b": "near", "c": "far", "d": "far"}) == {"d": pytest.approx(0.5)}

    def test_the_tolerance_is_the_callers(self):
        assert slow({0: 100.0, 1: 90.0}, tolerance=0.2) == {}


def test_the_best_of_all_attempts_counts():
    assert soundness.best_of([{0: 5.0, 1: 9.0}, {0: 7.0, 1: 8.0}, {0: 6.0}]) == {0: 7.0, 1: 9.0}


def test_slow_ones_are_named_with_their_share():
    (rank,) = soundness.slow_ranks({("bf16", 3): 0.9}, attempts=5)
    (link,) = soundness.slow_links({(1, 2): 0.25}, attempts=2)
    assert (rank.kind, rank.ranks) == ("slow rank", [3])
    assert rank.text == "rank 3 reaches 90.0% of its peers' median in bf16 products, at best of 5"
    assert (link.kind, link.ranks) == ("slow link", [1, 2])
    assert link.text == "rank 1 sends to rank 2 at 25.0% of the median of such links, at best of 2"


def test_what_other_load_may_have_slowed_is_marked():
    slow_ones = {("bf16", 3): 0.9, ("bf16", 4): 0.9}
    assert [found.beside_load for found in soundness.slow_ranks(slow_ones, 5, {4})] == [False, True]
    slow_links = {(0, 1): 0.9, (3, 4): 0.9, (4, 3): 0.9}
    assert [found.beside_load for found in soundness.slow_links(slow_links, 5, {4})] == [False, True, True]


class TestVerdict:
    SLOW, ERROR = soundness.Finding("slow rank", [1], "slow", beside_load=True), soundness.Finding("versions", [1], "")

    def test_nothing_found(self):
        assert soundness.verdict([]) == "sound"

    def test_nothing_but_what_other_load_may_have_caused(self):
        assert soundness.verdict([self.SLOW, self.SLOW]) == "busy"

    def test_anything_else_stays_unsound_whatever_the_load(self):
        assert soundness.verdict([self.SLOW, self.ERROR]) == "unsound"

    def test_a_gpu_that_others_use_is_busy(self):
        assert soundness.verdict([*soundness.gpu_troubles(0, {**GPU, "processes": 2}, 1, [0])]) == "busy"


def test_versions_that_differ_are_named_with_their_ranks():
    same = {"torch": "2.15.0", "python": "3.11.7", "driver": "550.54", "host": "n1"}
    (found,) = soundness.different_versions([same, {**same, "host": "n2"}, {**same, "driver": "535.1", "host": "n3"}])
    assert asdict(found) == {
        "kind": "versions", "ranks": [2], "text": "driver differs: 550.54 on ranks 0, 1, 535.1 on rank 2",
        "beside_load": False,
    }  # fmt: skip


def test_a_version_that_only_some_have_differs():
    (found,) = soundness.different_versions([{"nccl": "2.27"}, {"nccl": None}])
    assert found.text == "nccl differs: 2.27 on rank 0, None on rank 1"


class TestGpu:
    def found(self, users=1, cores=(2, 3), **changes):
        return [(finding.kind, finding.text) for finding in soundness.gpu_troubles(4, {**GPU, **changes}, users, cores)]

    def test_a_sound_one_at_its_power_cap(self):
        assert self.found() == []

    def test_one_that_is_too_hot(self):
        text = "the GPU of rank 4 is slowed down: too hot (hardware), at 60 °C"
        assert self.found(clock_reasons=["power cap", "too hot (hardware)"]) == [("throttled", text)]

    def test_one_that_others_use(self):
        assert self.found(processes=3) == [("busy", "the GPU of rank 4 is used by 2 other processes")]
        assert self.found(processes=2, users=2) == []

    def test_one_with_a_lower_power_limit(self):
        text = "the GPU of rank 4 may draw 500 W, and 700 W by default"
        assert self.found(power_limit_watts=500.0) == [("power limit", text)]

    def test_one_that_is_far_from_its_ranks_cores(self):
        text = "rank 4 may run on none of the cores that are near its GPU"
        assert self.found(cores=(8, 9)) == [("far cores", text)]

    def test_one_that_tells_nothing(self):
        assert self.found(**dict.fromkeys(GPU)) == []
