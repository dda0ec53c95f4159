"""Clocks, the timing of messages, and statistics of times."""

import random
import statistics

import pytest
import torch
import torch.distributed as dist

from benchmarks.ratio import by_turns, paired_ratio
from ptdbench.measure import timing
from ptdbench.measure.memory import HostMemory
from ptdbench.measure.results import StepSeconds
from ptdbench.measure.timing import Effort, median_interval, summary, warmup_end, warmup_ends
from ptdbench.problems import ConfigError
from ptdbench.workloads.collectives import Collectives
from tests.refusals import refusal_of


def test_host_clock_counts_between_start_and_stop(monkeypatch):
    now = iter([100.0, 102.0, 150.0, 150.25, 160.0, 161.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    host = timing.clock_for(torch.device("cpu"))
    for done in range(2):
        host.start()
        assert host.finished() == done, "a step that is under way"
        host.stop()
    seconds = host.seconds()
    assert host.finished() == 2
    host.forget()
    host.start()
    host.stop()
    assert (seconds, host.seconds()) == ([2.0, 0.25], [1.0])


class Event:
    """Stands for an event of a GPU: the device comes to it when the test says so."""

    device_now = 0.0
    reached: float

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.queued_at: float | None = None

    def record(self) -> None:
        Event.device_now += 250  # milliseconds of work queued since the last event
        self.queued_at = Event.device_now

    def elapsed_time(self, end: "Event") -> float:
        return end.queued_at - self.queued_at


class Count:
    """Stands for the count that a GPU writes: what was marked up to where it is."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def mark(self, number: int) -> None:
        self.marks.append((Event.device_now, number))

    def number(self) -> int:
        return max((number for at, number in self.marks if at <= Event.reached), default=0)


@pytest.fixture
def device(monkeypatch) -> timing.Clock:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "DeviceCount", Count)
    Event.device_now, Event.reached = 0.0, 0.0
    return timing.clock_for(torch.device("cuda", 0))


def test_device_clock_counts_without_waiting(monkeypatch, device):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    for _ in range(2):
        device.start()
        device.stop()
    assert device.finished() == 0
    Event.reached = 500.0  # the end of the first step
    assert device.finished() == 1
    assert not waited
    assert device.seconds() == [0.25, 0.25]
    assert waited


def test_forgotfew_steps_are_not_counted(device):
    Event.reached = 1e9
    for done in range(3):
        device.start()
        assert device.finished() == done, "a step that is under way"
        device.stop()
    assert device.finished() == 3
    device.forget()
    assert device.finished() == 0
    Event.reached = Event.device_now
    device.start()
    device.stop()
    assert device.finished() == 0


@pytest.mark.gpu
def test_real_gpu_is_timed_by_its_stream():
    device, x = timing.clock_for(torch.device("cuda", 0)), torch.ones(4096, 4096, device="cuda")
    for _ in range(2):
        device.start()
        x @ x
        device.stop()
    assert min(device.seconds()) > 0
    assert device.finished() == 2


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [((8, 64, 2), [8, 16, 32, 64]), ((8, 100, 4), [8, 32, 100]), ((8, 8, 2), [8]), ((1, 1000, 1000), [1, 1000])],
)
def test_sizes_end_with_the_largest(asked, sizes):
    assert timing.sizes(*asked) == sizes


def test_repetitions_fill_the_time_within_bounds():
    effort = Effort(seconds=0.1, min_repetitions=5, max_repetitions=200, max_seconds=1.0)
    assert [effort.repetitions(once) for once in (0.001, 0.01, 0.02, 1e-5, 0.0)] == [100, 10, 5, 200, 200]
    assert [effort.repetitions(once) for once in (0.2, 0.21, 3.0)] == [5, 4, 1]  # slow ones fewer times, but once


def test_memory_that_is_required_is_a_share_of_the_free_and_the_cached(monkeypatch):
    monkeypatch.setattr(timing, "host_memory", lambda: HostMemory(100, 60))
    monkeypatch.setattr(timing, "gather", lambda told: [told])
    timing.require_memory(CPU, 2, 30, "workload.shapes", "512")
    with pytest.raises(ConfigError, match="but rank 0 has"):
        timing.require_memory(CPU, 2, 31, "workload.shapes", "512")
    # As after a run, whose ceiling is measured again.
    free = [10]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(90))
    monkeypatch.setattr(timing, "gather", lambda told: [told])
    timing.require_memory(torch.device("cuda"), 1, 90, "workload.shapes", "512")


@pytest.fixture
def alone(monkeypatch):
    """One rank: it is always the slowest."""
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda values, op, group: None)


def test_repetitions_follow_the_warm_up(alone):
    calls = []
    effort = Effort(seconds=1e-12, min_repetitions=2, max_repetitions=9, warmup=3, max_seconds=1e9)
    seconds = timing.repeat(lambda: calls.append(1), CPU, effort)
    assert (len(calls), len(seconds)) == (3 + 2, 2)


@pytest.mark.parametrize(("options", "message"), [
    ({"min_bytes": 0}, "min_bytes=0: must be a whole number of at least 1"),
    ({"factor": 1}, "factor=1: must be a whole number of at least 2"),
    ({"warmup": 0}, "warmup=0: must be a whole number of at least 1"),
    ({"min_bytes": 64, "max_bytes": 8}, "max_bytes=8: must be at least min_bytes, 64"),
    ({"min_repetitions": 9, "max_repetitions": 8}, "max_repetitions=8: must be at least min_repetitions, 9"),
    ({"seconds": 0}, "seconds=0: must be greater than 0"),
    ({"max_seconds": -1.0}, "max_seconds=-1.0: must be greater than 0"),
])  # fmt: skip
def test_impossible_options_are_refused(options, message):
    assert refusal_of(Collectives, **options) == message


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
