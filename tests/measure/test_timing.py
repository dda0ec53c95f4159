"""How messages are timed: sizes, how often, and whose time counts."""

import pytest
import torch
import torch.distributed as dist

from ptdbench.measure import timing
from ptdbench.measure.memory import HostMemory
from ptdbench.measure.timing import Effort
from ptdbench.problems import ConfigError
from ptdbench.workloads.collectives import Collectives
from tests.refusals import refusal_of

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
