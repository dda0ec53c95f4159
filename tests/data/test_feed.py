"""Feeds with workers in a rank of their own, as these are forked, and a test's process has threads of many others'."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from ptdbench.data.feed import Feed
from tests.conftest import ROOT
from tests.parallel.ranks import each, on_ranks
from tests.workloads.made_task import Largest, Reveals

CPU = torch.device("cpu")


def rows(step: int) -> tuple[int, int]:
    return 10 * step, 10 * step + 4


def batches_are_those_of_the_rows_from_any_step_on_and_leave_chance_alone() -> None:
    before = torch.get_rng_state()
    for workers in (0, 1, 2):
        feed = Feed(Largest(seed=3, workers=workers), rows, CPU)
        steps = [(step, feed(step)) for step in (0, 1, 2, 3, 7, 8)]  # begun anew at another step
        steps += [(20, feed.peek(20)), (9, feed(9))]
        feed.close()
        for step, batch in steps:
            assert all(map(torch.equal, batch, Largest(seed=3).samples(*rows(step)))), (workers, step)
        assert len(feed.wait_seconds) == 7  # a look ahead is no step
    assert torch.equal(torch.get_rng_state(), before)


def workers_make_them_elsewhere_and_end_with_it_and_without_any_it_is_done_here() -> None:
    here, there = (Feed(Reveals(seed=0, workers=workers), rows, CPU) for workers in (0, 2))
    by_rank, by_workers = ({feed(step)[1][0].item() for step in range(4)} for feed in (here, there))
    assert by_rank == {os.getpid()}
    assert len(by_workers - by_rank) == 2
    processes = [psutil.Process(pid) for pid in by_workers]
    assert all(maker.is_running() for maker in processes)
    there.close()
    assert all(not maker.is_running() or maker.status() == psutil.STATUS_ZOMBIE for maker in processes)


def test_waiting_is_counted_for_every_step(monkeypatch):
    now = iter([0.0, 0.5, 2.0, 2.25])
    monkeypatch.setattr("ptdbench.data.feed.time.perf_counter", lambda: next(now))
    batches = Feed(Largest(seed=0), rows, CPU)
    batches(0), batches(1)
    assert batches.wait_seconds == [0.5, 0.25]


KILLED = """
import os, signal, sys, torch
from ptdbench.data.feed import Feed
from tests.workloads.made_task import Reveals

feed = Feed(Reveals(seed=0, workers=1), lambda step: (step, step + 1), torch.device("cpu"))
print(feed(0)[1].item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_die_with_their_rank(environ):
    # Started as ranks are, from whose server its own processes would be forked by default.
    body = f"import multiprocessing; multiprocessing.set_start_method('forkserver'){KILLED}"
    killed = subprocess.run(
        [sys.executable, "-c", body], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=240, check=False
    )
    maker = int(killed.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(maker) and psutil.Process(maker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def a_signal_to_all_processes_is_left_to_the_rank() -> None:
    feed = Feed(Reveals(seed=0, workers=1), rows, CPU)
    maker = int(feed(0)[1][0])
    for step, number in enumerate((signal.SIGINT, signal.SIGUSR2, signal.SIGTERM), start=1):
        os.kill(maker, number)
        makers = [feed(3 * step - 2 + ahead)[1][0].item() for ahead in range(3)]  # more than were ready
        assert makers == [maker] * 3
    feed.close()


class Collects(Reveals):
    """Says whether a collection here would see a circle that was garbage in the rank before."""

    def samples(self, start, stop):
        seen = any(isinstance(item, Circle) for item in gc.get_objects())
        return torch.arange(start, stop), torch.tensor([seen] * (stop - start))


class Circle:
    """As a traceback that holds the store of a run before, and that it is held by."""


def garbage_of_the_rank_is_not_collected_in_a_worker() -> None:
    gc.disable()
    circle = Circle()
    circle.itself = circle  # type: ignore[attr-defined]
    del circle
    feed = Feed(Collects(seed=3, workers=1), rows, CPU)
    assert not feed(0)[1][0]
    feed.close()


class Broken(Largest):
    def samples(self, start: int, stop: int) -> Any:
        raise ValueError(f"cat.jpg is broken in {start}")


def what_a_worker_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match=r"cat\.jpg is broken in 10"):
        Feed(Broken(seed=0, workers=1), rows, CPU)(1)


class Cramped(Largest):
    """Made in a process that cannot have more shared memory, as in a container with a full one."""

    def samples(self, start: int, stop: int) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return super().samples(start, stop)


def a_lack_of_shared_memory_is_raised_here_at_once() -> None:
    size = sum(tensor.nbytes for tensor in Largest(seed=0).samples(0, 4))
    with pytest.raises(OSError, match=f"a batch of {size} B does not fit into .* shared memory.* data.workers=0"):
        Feed(Cramped(seed=0, workers=1), rows, CPU)(1)


def called(body: Callable[[], None]) -> None:
    body()


@pytest.mark.ranks
def test_feeds_of_a_rank():
    """In one rank; what fails is named."""
    bodies = [
        batches_are_those_of_the_rows_from_any_step_on_and_leave_chance_alone,
        workers_make_them_elsewhere_and_end_with_it_and_without_any_it_is_done_here,
        a_signal_to_all_processes_is_left_to_the_rank,
        what_a_worker_raises_is_raised_here,
        a_lack_of_shared_memory_is_raised_here_at_once,
        garbage_of_the_rank_is_not_collected_in_a_worker,
    ]
    on_ranks(1, each, called, bodies)


class Cuda:
    """What a feed asks of CUDA, and in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, Any]] = []

        def note(call: str, value: Any = None) -> None:
            self.calls.append((threading.current_thread().name.partition("_")[0], call, value))

        def pinned(tensor: torch.Tensor) -> torch.Tensor:
            note("pin", int(tensor.flatten()[0]))
            return tensor

        def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
            note("copy", (str(device), non_blocking))
            return tensor

        monkeypatch.setattr(torch.cuda, "set_device", lambda device: note("device", str(device)))
        monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        monkeypatch.setattr(torch.Tensor, "to", to)

    def of(self, call: str) -> list[tuple[str, Any]]:
        return [(thread, value) for thread, name, value in self.calls if name == call]


@pytest.mark.parametrize(("samples", "told"), [
    ((torch.zeros(3, 6), torch.zeros(3)), r"\(3, 6\) and \(3,\)"),
    ((torch.zeros(4, 5), torch.zeros(4)), r"\(4, 5\) and \(4,\)"),
    ({"inputs": torch.zeros(4, 6)}, r"\(4, 6\)"),
    ((np.zeros((4, 6)), np.zeros(4)), "ndarray and ndarray"),
])  # fmt: skip
def test_samples_of_wrong_shape_are_refused(monkeypatch, samples, told):
    monkeypatch.setattr(Largest, "samples", lambda *_: samples)
    rule = rf"^Largest\.samples\(20, 24\) must return tensors of shape \(4, 6\) and \(4,\), .*, but returns {told}$"
    with pytest.raises(TypeError, match=rule):
        Feed(Largest(seed=0), rows, CPU)(2)


class TestForAGpu:
    def test_thread_makes_and_pins_ahead(self, monkeypatch):
        cuda = Cuda(monkeypatch)
        feed = Feed(Reveals(seed=0), rows, torch.device("cuda", 1))
        made = [feed(step) for step in (0, 1, 7, 8)]  # begun anew at another step
        feed.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
        assert [inputs[0].item() for inputs, _ in made] == [0, 10, 70, 80]
        assert cuda.of("device") == [("batches", "cuda:1")] * 2
        assert {thread for thread, _ in cuda.of("pin")} == {"batches"}
        assert cuda.of("copy") == [("MainThread", ("cuda:1", True))] * 8
        assert len(feed.wait_seconds) == 4

    def test_next_batch_is_made_during_the_step(self, monkeypatch):
        Cuda(monkeypatch)
        made = {step: threading.Event() for step in range(10)}

        class Watched(Reveals):
            def samples(self, start: int, stop: int) -> Any:
                made[start // 10].set()
                return super().samples(start, stop)

        feed = Feed(Watched(seed=0), rows, torch.device("cuda"))
        feed(0)
        assert made[2].wait(60)
        feed.close()
        assert not made[3].is_set()

    def test_thread_errors_are_raised_in_the_step(self, monkeypatch):
        Cuda(monkeypatch)
        feed = Feed(Broken(seed=0), rows, torch.device("cuda"))
        with pytest.raises(ValueError, match="is broken in 0"):
            feed(0)
        feed.close()
