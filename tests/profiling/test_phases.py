import pytest

from ptdbench.profiling.events import CommCall
from ptdbench.profiling.phases import PHASES, Ready, partition
from ptdbench.profiling.trace import Trace


def parted(waits, calls, ready, phases=None, steps=((0.0, 10.0),)):
    return partition(Trace(steps, phases or {}, waits, calls), ready)


def test_phases_add_up_to_the_step():
    phases = {"data": [(0.0, 1.0)], "forward": [(1.0, 3.0)], "backward": [(3.0, 6.0)], "optimizer": [(8.0, 9.0)]}
    times = parted([(6.0, 8.0)], [CommCall("all_reduce", 8, 5.0, 7.5)], [Ready(5.0)], phases)
    assert list(times.seconds) == list(PHASES)
    assert times.seconds == {
        "data": 1, "forward": 2, "backward": 3, "communication": 2, "stragglers": 0, "experts": 0, "bubble": 0,
        "host": 0, "optimizer": 1, "other": 1,
    }  # fmt: skip


def test_each_wait_counts_for_its_last_rank_in_its_step():
    times = parted([(2.0, 6.0)], [CommCall("all_reduce", 8, 1.0, 6.0)], [Ready(5.0, last=3)])
    assert (times.seconds["stragglers"], times.seconds["communication"]) == (3, 1)
    assert times.waited_for == [{3: 3.0}]
    of = times.traffic["all_reduce"]
    assert (of.calls, of.bytes, of.seconds, of.exposed_seconds) == (1, 8, 1, 1)
    calls = [CommCall("all_reduce", 8, start, start + 4) for start in (1.0, 3.0, 11.0)]
    ready = [Ready(4.0, last=3), Ready(6.0, last=1), Ready(14.0, last=1)]
    steps = ((0.0, 10.0), (10.0, 20.0), (20.0, 30.0))
    times = parted([(1.0, 7.0), (11.0, 15.0)], calls, ready, steps=steps)
    assert times.waited_for == [{3: 3.0, 1: 1.0}, {1: 3.0}, {}]


def test_wait_for_a_stage_is_a_bubble_and_for_combine_the_fullest_experts():
    times = parted([(2.0, 6.0)], [CommCall("recv", 8, 2.0, 6.0, peer=0)], [Ready(5.5, last=0)])
    assert (times.seconds["bubble"], times.seconds["communication"]) == (3.5, 0.5)
    calls = [CommCall("dispatch", 8, 0.0, 2.0), CommCall("combine", 8, 3.0, 8.0)]
    times = parted([(0.0, 2.0), (3.0, 8.0)], calls, [Ready(1.0, last=1), Ready(7.0, last=1)])
    assert (times.seconds["stragglers"], times.seconds["experts"], times.seconds["communication"]) == (1, 4, 2)


def test_what_is_beside_a_wait_decides_what_it_is():
    phases = {"backward": [(0.0, 8.0)]}
    times = parted([(8.0, 9.0)], [CommCall("all_reduce", 8, 1.0, 9.0)], [Ready(1.0)], phases)
    assert times.seconds["communication"] == 1
    assert times.traffic["all_reduce"].seconds == 8
    calls = [CommCall("all_gather", 8, 0.0, 5.0), CommCall("all_reduce", 8, 1.0, 7.0)]
    times = parted([(2.0, 7.0)], calls, [Ready(0.0), Ready(6.0, last=1)])
    assert times.traffic["all_gather"].exposed_seconds == 3
    assert times.seconds["stragglers"] == 1
    assert times.traffic["all_reduce"].exposed_seconds == 1
    times = parted([(2.0, 7.0)], [CommCall("all_reduce", 8, 1.0, 4.0)], [Ready(1.0)])
    assert times.traffic["all_reduce"].exposed_seconds == 5
    times = parted([(2.0, 7.0)], [], [])
    assert (times.seconds["communication"], times.traffic["unknown"].exposed_seconds) == (5, 5)


def test_calls_count_once_and_without_known_end_not_at_all():
    calls = [CommCall("all_reduce", 8, start, end) for start, end in ((0.0, 1.0), (12.0, 16.0), (13.0, 18.0))]
    times = parted([], calls, [Ready(0.0), Ready(12.0), Ready(13.0)], steps=((10.0, 15.0), (15.0, 20.0)))
    of = times.traffic["all_reduce"]
    assert (times.steps, of.calls, of.seconds) == (2, 2, 6)
    calls = [
        CommCall("recv", 8, start, start + 2, held=((start, start), (start + 1, start + 2))) for start in (1.0, 4.0)
    ]
    times = parted([(2.0, 3.0)], calls, [Ready(1.0, done=1.5), Ready(4.0)])
    of = times.traffic["recv"]
    assert (of.calls, of.timed, of.seconds, of.exposed_seconds) == (2, 1, 0.5, 1)


@pytest.mark.parametrize("since", [-5.0, 50.0])
def test_wrong_clock_makes_no_phase_negative(since):
    times = parted([(2.0, 6.0)], [CommCall("all_reduce", 8, 2.0, 6.0)], [Ready(since, last=1)])
    assert min(times.seconds.values()) >= 0
    assert sum(times.seconds.values()) == 10
