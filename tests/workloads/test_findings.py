"""The verdict, from figures that are given: what is named, and what is not."""

import pytest
from msgspec.structs import asdict, replace

from ptdbench.measure.node_state import Gpu
from ptdbench.measure.results import Finding
from ptdbench.workloads import check

UNKNOWN = Gpu(*[None] * len(Gpu.__struct_fields__))
GPU = replace(
    UNKNOWN, clock_reasons=["power cap"], temperature_celsius=60, processes=1, power_limit_watts=700.0,
    power_limit_default_watts=700.0, near_cores=[0, 1, 2, 3],
)  # fmt: skip


@pytest.mark.parametrize(("rates", "expected"), [
    ({0: 100.0, 1: 100.0, 2: 94.0, 3: 100.0}, {2: 0.94}),  # below the median of the others
    ({0: 100.0, 1: 96.0, 2: 95.0, 3: 100.0}, {}),  # within the tolerance
    ({0: 100.0, 1: 90.0}, {1: 0.9}),
    ({0: 100.0, 1: 100.0, 2: 300.0}, {}),  # faster than all is no fault
    ({0: 1.0}, {}),  # one alone has no peers
])  # fmt: skip
def test_slow_is_what_is_below_the_median_of_its_peers(rates, expected):
    assert check.slow_rates(rates, dict.fromkeys(rates, "all"), 0.05) == pytest.approx(expected)


def test_only_peers_count_and_of_all_attempts_the_best():
    rates = {"a": 900.0, "b": 890.0, "c": 20.0, "d": 10.0}
    peers = {"a": "near", "b": "near", "c": "far", "d": "far"}
    assert check.slow_rates(rates, peers, 0.05) == {"d": pytest.approx(0.5)}
    assert check.slow_rates(rates, peers, 0.6) == {}
    assert check.best_rates([{0: 5.0, 1: 9.0}, {0: 7.0, 1: 8.0}, {0: 6.0}]) == {0: 7.0, 1: 9.0}


def test_slow_ones_are_named_with_their_share_and_marked_if_other_load_may_have_slowed_them():
    rank, loaded = check.slow_ranks({("bf16", 3): 0.9, ("bf16", 4): 0.9}, 5, {4})
    text = "rank 3 reaches 90.0% of its peers' median in bf16 products, best of 5"
    assert (rank, loaded.beside_load) == (Finding("slow rank", [3], text), True)
    link, *others = check.slow_links({(1, 2): 0.0001, (3, 4): 0.9, (4, 3): 0.9}, 2, {4})
    text = "rank 1 sends to rank 2 at less than 0.1% of the median of similar links, best of 2"
    assert link == Finding("slow link", [1, 2], text)
    assert [other.beside_load for other in others] == [True, True]


def test_the_verdict_and_versions_that_differ():
    """Busy is what other load may have caused, and nothing else."""
    slow = Finding("slow rank", [1], "slow", beside_load=True)
    shared = [*check.gpu_troubles(0, replace(GPU, processes=2), 1, [0])]
    findings = ([], [slow, slow], [slow, Finding("versions", [1], "")], shared)
    assert [check.verdict_on(of_ranks) for of_ranks in findings] == ["sound", "busy", "unsound", "busy"]
    same = {"torch": "2.15.0", "python": "3.11.7", "driver": "550.54", "host": "n1"}
    (finding,) = check.different_versions([same, {**same, "host": "n2"}, {**same, "driver": None, "host": "n3"}])
    assert finding == Finding("versions", [2], "driver differs: 550.54 on ranks 0, 1, None on rank 2")


@pytest.mark.parametrize(("changes", "users", "cores", "kind", "text"), [
    (
        {"clock_reasons": ["power cap", "too hot (hardware)"]}, 1, (2, 3), "throttled",
        "the GPU of rank 4 is throttled: too hot (hardware), at 60 °C",
    ),
    ({"processes": 3}, 1, (2, 3), "busy", "the GPU of rank 4 is used by 2 other processes"),
    (
        {"power_limit_watts": 500.0}, 1, (2, 3), "power limit",
        "the GPU of rank 4 is limited to 500 W, below the default 700 W",
    ),
    ({}, 1, (8, 9), "far cores", "rank 4 cannot run on any core near its GPU"),
    ({}, 1, (2, 3), None, None),  # at its power cap
    ({"processes": 2}, 2, (2, 3), None, None),
    (asdict(UNKNOWN), 1, (2, 3), None, None),
])  # fmt: skip
def test_troubles_of_a_gpu(changes, users, cores, kind, text):
    findings = [
        (finding.kind, finding.text) for finding in check.gpu_troubles(4, replace(GPU, **changes), users, cores)
    ]
    assert findings == ([(kind, text)] if kind else [])
