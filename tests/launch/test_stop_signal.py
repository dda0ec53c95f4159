"""The stop_signal: ranks that get a signal stop together, after the same step."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch import local, rendezvous
from ptdbench.launch.stop_signal import StopSignal
from ptdbench.launch.world import discover
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.ranks


def drive(environ: dict[str, str], folder: Path, parent: int, name: str) -> None:
    """In a rank: step until a stop signal is received, then save while more signals arrive.

    After the third step rank 1 lets ``parent`` send the ranks a signal, or gets one itself if there is no parent.
    """
    world = discover(os.environ)
    assert world is not None
    number = getattr(signal, name)
    with rendezvous.process_group(world, "gloo", torch.device("cpu"), key=str(folder)), StopSignal(0.01) as stop_signal:
        done, received = 0, None
        while received is None:
            dist.all_reduce(torch.ones(1))
            done += 1
            if (world.rank, done) == (1, 3):
                os.kill(parent or os.getpid(), number)
            received = stop_signal.received(done)
        if world.rank == 1:
            os.kill(parent or os.getpid(), number)  # a second one, during the save
        time.sleep(0.3)
        dist.barrier()
        (folder / f"{world.rank}.json").write_text(json.dumps([received, done]))


def stopped_at(folder: Path) -> str:
    """The signal that all three ranks found after the same step."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert found == [found[0]] * 3
    assert found[0][1] >= 3
    return found[0][0]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR2"])
def test_a_signal_to_the_parent_stops_all_ranks_after_the_same_step_and_a_second_does_no_harm(tmp_path, name):
    with pytest.raises(local.Stopped, match=name):
        local.start(drive, 3, tmp_path, os.getpid(), name, grace=3600)
    assert stopped_at(tmp_path) == name


def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(tmp_path):
    local.start(drive, 3, tmp_path, 0, "SIGTERM")
    assert stopped_at(tmp_path) == "SIGTERM"


def collectives(every_seconds: float, steps: int, step_seconds: float) -> list[int]:
    """The steps after which a collective happened."""
    after, real = [], dist.all_reduce
    with StopSignal(every_seconds) as stop_signal, mock.patch.object(dist, "all_reduce", wraps=real) as reduce:
        for done in range(1, steps + 1):
            time.sleep(step_seconds)
            assert stop_signal.received(done) is None
            if reduce.call_count > len(after):
                after.append(done)
    return after


def uneven() -> list[int]:
    """On two ranks whose steps take different times, which only differ until they meet."""
    return collectives(0.1, 6, 0.06 * dist.get_rank())


def test_checks_come_at_doubling_distances_and_after_every_slow_step_on_all_ranks_alike():
    assert on_ranks(2, collectives, 3600.0, 100, 0.0) == [[1, 3, 7, 15, 31, 63]] * 2
    assert on_ranks(2, collectives, 0.02, 5, 0.03) == [[1, 2, 3, 4, 5]] * 2
    assert on_ranks(2, uneven) == [[1, 2, 3, 4, 5, 6]] * 2


def meanwhile() -> list[Any]:
    """What parts of a whole between two steps are told, before and after rank 1 gets a signal, and then its steps."""
    with StopSignal(0.0) as stop_signal:
        received = stop_signal.meanwhile()
        told: list[Any] = [stop_signal.received(1000), received(1)]  # a count of its own
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        told.append(received(2))
        with mock.patch.object(dist, "all_reduce") as reduce:  # all ranks know it by now
            return [*told, received(2), stop_signal.received(1000), stop_signal.meanwhile()(1), reduce.call_count]


def test_what_takes_long_between_two_steps_hears_a_signal_and_the_steps_know_of_it():
    assert on_ranks(2, meanwhile) == [[None, None, *["SIGTERM"] * 4, 0]] * 2


def press(signals: list[list[str]]) -> list[Any]:
    """Each rank gets its own signals before it asks; what it asks first and then again; and what later signals do."""
    for name in local.STOP_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    with StopSignal(0) as stop_signal:
        for name in signals[dist.get_rank()]:
            os.kill(os.getpid(), getattr(signal, name))
        asked: list[Any] = [stop_signal.received(7), stop_signal.received(8)]
    (after,) = {signal.getsignal(getattr(signal, name)) for name in local.STOP_SIGNALS}
    return [*asked, after]


@pytest.mark.parametrize(
    ("signals", "name"),
    [
        ([["SIGUSR2", "SIGTERM"]], "SIGUSR2"),  # the first one counts
        ([["SIGHUP"], []], "SIGHUP"),
        ([["SIGUSR2"], ["SIGTERM"]], "SIGTERM"),  # all ranks name the same
        ([[], []], None),
    ],
)
def test_all_ranks_hear_the_same_and_once_they_have_they_ignore_what_comes_later(signals, name):
    later = signal.SIG_IGN if name else signal.SIG_DFL
    assert on_ranks(len(signals), press, signals) == [[name, name, later]] * len(signals)
