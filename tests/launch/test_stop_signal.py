"""Ranks that get a stop signal stop together, after the same step; tests/test_resume.py sends them to a whole run."""

import os
import signal
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ptdbench.launch import local
from ptdbench.launch.stop_signal import StopSignal
from tests.parallel.ranks import each, on_ranks

pytestmark = pytest.mark.ranks

checked_every = partial(mock.patch, "ptdbench.launch.stop_signal.CHECK_SECONDS")


def collectives(every_seconds: float, steps: int, step_seconds: tuple[float, float]) -> list[int]:
    """The steps after which a collective happened, where a step takes this rank so long."""
    after, real = [], dist.all_reduce
    counted = mock.patch.object(dist, "all_reduce", wraps=real)
    with checked_every(every_seconds), StopSignal() as stop_signal, counted as reduce:
        for done in range(1, steps + 1):
            time.sleep(step_seconds[dist.get_rank()])
            assert stop_signal.received(done) is None
            if reduce.call_count > len(after):
                after.append(done)
    return after


def test_checks_double_their_distance_alike_on_all_ranks():
    expected = {
        (3600.0, 100, (0.0, 0.0)): [1, 3, 7, 15, 31, 63],
        (0.02, 5, (0.03, 0.03)): [1, 2, 3, 4, 5],
        (0.1, 6, (0.0, 0.06)): [1, 2, 3, 4, 5, 6],  # which only differ until they meet
    }
    assert on_ranks(2, each, collectives, list(expected)) == [expected] * 2


def meanwhile() -> list[Any]:
    """What parts of a whole between two steps are told, before and after rank 1 gets a signal, and then its steps."""
    with checked_every(0.0), StopSignal() as stop_signal:
        received = stop_signal.meanwhile()
        told: list[Any] = [stop_signal.received(1000), received(1)]  # a count of its own
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        told.append(received(2))
        with mock.patch.object(dist, "all_reduce") as reduce:  # all ranks know it by now
            return [*told, received(2), stop_signal.received(1000), stop_signal.meanwhile()(1), reduce.call_count]


def test_long_operation_hears_a_signal_and_steps_know_it():
    assert on_ranks(2, meanwhile) == [[None, None, *["SIGTERM"] * 4, 0]] * 2


def press(*signals: tuple[str, ...]) -> list[Any]:
    """Each rank gets its own signals before it asks; what it asks first and then again; and what later signals do."""
    for name in local.STOP_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    with checked_every(0.0), StopSignal() as stop_signal:
        for name in signals[dist.get_rank()]:
            os.kill(os.getpid(), getattr(signal, name))
        asked: list[Any] = [stop_signal.received(7), stop_signal.received(8)]
    (after,) = {signal.getsignal(getattr(signal, name)) for name in local.STOP_SIGNALS}
    return [*asked, after]


def test_ranks_agree_on_one_signal_and_ignore_later_ones():
    heard = {
        (("SIGUSR2", "SIGTERM"), ()): "SIGUSR2",  # the first one counts
        ((), ("SIGHUP",)): "SIGHUP",
        (("SIGUSR2",), ("SIGTERM",)): "SIGTERM",  # all ranks name the same
        ((), ()): None,
    }
    expected = {case: [name, name, signal.SIG_IGN if name else signal.SIG_DFL] for case, name in heard.items()}
    assert on_ranks(2, each, press, list(heard)) == [expected] * 2


def fail() -> list[str]:
    """How a failure ends a rank that has been told to stop, and one that has not."""
    told = []
    failure = RuntimeError("its compiler has failed")
    for number, error in ((signal.SIGINT, failure), (0, failure), (signal.SIGINT, MemoryError("no more"))):
        try:
            with StopSignal():
                os.kill(os.getpid(), number)
                raise error
        except (local.Stopped, RuntimeError, MemoryError) as found:
            told.append(str(found))
    return told


def test_failure_after_a_signal_is_a_stop_unless_memory_ran_out():
    assert on_ranks(1, fail) == [["stopped by SIGINT", "its compiler has failed", "no more"]]
