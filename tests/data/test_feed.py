from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from ptdbench.data.feed import Feed
from tests.conftest import ROOT
from tests.workloads.made_task import Largest, Reveals

CPU = torch.device("cpu")


def rows(step: int) -> tuple[int, int]:
    return 10 * step, 10 * step + 4


@pytest.fixture
def feed():
    made = []

    def make(data) -> Feed:
        made.append(Feed(data, rows, CPU))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_those_of_the_rows_in_their_order(feed, workers):
    batches = feed(Largest(seed=3, workers=workers))
    for step in range(5):
        expected = Largest(seed=3).samples(*rows(step))
        for found, wanted in zip(batches(step), expected, strict=True):
            assert torch.equal(found, wanted)


def test_workers_make_them_elsewhere_and_without_any_it_is_done_here(feed):
    here, there = feed(Reveals(seed=0)), feed(Reveals(seed=0, workers=2))
    assert here(0)[1].unique().tolist() == [os.getpid()]
    makers = {there(step)[1][0].item() for step in range(4)}
    assert len(makers) == 2
    assert os.getpid() not in makers


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_may_begin_at_any_step(feed, workers):
    batches = feed(Reveals(seed=0, workers=workers))
    assert [batches(step)[0][0].item() for step in (7, 8)] == [70, 80]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_ahead_changes_nothing(feed, workers):
    batches = feed(Reveals(seed=0, workers=workers))
    assert batches.peek(3)[0][0].item() == 30
    assert [batches(step)[0][0].item() for step in (3, 4)] == [30, 40]
    assert len(batches.wait_seconds) == 2  # a look ahead is no step


def test_waiting_is_counted_for_every_step(feed, monkeypatch):
    now = iter([0.0, 0.5, 2.0, 2.25])
    monkeypatch.setattr("ptdbench.data.feed.time.perf_counter", lambda: next(now))
    batches = feed(Largest(seed=0))
    batches(0), batches(1)
    assert batches.wait_seconds == [0.5, 0.25]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_numbers_of_the_rank_stay_where_they_are(feed, workers):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    feed(Largest(seed=0, workers=workers))(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_end_with_it(feed):
    batches = feed(Reveals(seed=0, workers=1))
    maker = psutil.Process(batches(0)[1][0].item())
    batches.close()
    assert not maker.is_running() or maker.status() == psutil.STATUS_ZOMBIE


KILLED = """
import os, signal, sys, torch
from ptdbench.data.feed import Feed
from tests.conftest import ROOT
from tests.workloads.made_task import Reveals

feed = Feed(Reveals(seed=0, workers=1), lambda step: (step, step + 1), torch.device("cpu"))
print(feed(0)[1].item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_a_rank_that_is_killed(environ):
    # Started as ranks are, from whose server its own processes would be forked by default.
    body = f"import multiprocessing; multiprocessing.set_start_method('forkserver'){KILLED}"
    killed = subprocess.run(
        [sys.executable, "-c", body], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    maker = int(killed.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(maker) and psutil.Process(maker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_all_processes_is_left_to_the_rank(feed, number):
    batches = feed(Reveals(seed=0, workers=1))
    maker = batches(0)[1][0].item()
    os.kill(maker, number)
    assert [batches(step)[1][0].item() for step in (1, 2, 3, 4)] == [maker] * 4


def test_what_a_worker_raises_is_raised_here(feed):
    class Broken(Largest):
        def samples(self, start, stop):
            raise ValueError(f"cat.jpg is broken in {start}")

    with pytest.raises(ValueError, match=r"cat\.jpg is broken in 0"):
        feed(Broken(seed=0, workers=1))(0)
