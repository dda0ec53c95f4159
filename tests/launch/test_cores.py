"""Which cores ranks get, bound by their launcher or not, and that a process keeps to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ptdbench.launch import settings
from tests.conftest import ROOT

FOUR, ODD = frozenset({0, 1, 2, 3}), frozenset({9, 1, 5, 13})
SOCKETS = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1}), frozenset({2, 3})]
OVERLAPPING = [frozenset({0, 1, 2, 3}), frozenset({2, 3, 4, 5})]


@pytest.mark.parametrize(
    ("of_ranks", "wanted", "found"),
    [
        # Ranks that are free divide the threads and stay free, but for a number that is asked for.
        ([FOUR, FOUR], "auto", [(2, None)] * 2),
        ([FOUR, FOUR], 2, [(2, {0, 1}), (2, {2, 3})]),
        ([FOUR, FOUR], 1, [(1, {0}), (1, {1})]),
        ([ODD, ODD], 2, [(2, {1, 5}), (2, {9, 13})]),
        # Ranks that their launcher has bound keep to their cores; here pairs share a socket.
        ([frozenset({0, 1, 2}), frozenset({4, 5, 6})], "auto", [(3, None)] * 2),
        ([frozenset({0, 1, 2}), frozenset({4, 5, 6})], 2, [(2, {0, 1}), (2, {4, 5})]),
        (SOCKETS, "auto", [(1, None)] * 4),
        (SOCKETS, 1, [(1, {0}), (1, {2}), (1, {1}), (1, {3})]),
        # Where cores overlap in part two ranks might be bound to the same core, each counting in its own set.
        (OVERLAPPING, "auto", [(2, None)] * 2),
        (OVERLAPPING, 2, [(2, None)] * 2),
        # Where there are too few nobody is bound, and a rank has one thread at least.
        ([FOUR, FOUR, FOUR], 2, [(2, None)] * 3),
        ([frozenset({0})], 4, [(4, None)]),
        ([frozenset({7})] * 3, "auto", [(1, None)] * 3),
    ],
)
def test_each_rank_of_a_node_gets_its_share(of_ranks, wanted, found):
    assert [settings.share_cores(of_ranks, rank, wanted) for rank in range(len(of_ranks))] == found


#: Binds itself while a thread of its own runs, and tells where each thread may run then.
BINDS = """
import json, os, sys, threading
from ptdbench.launch import settings

go_on = threading.Event()
threading.Thread(target=go_on.wait, daemon=True).start()
wish = json.loads(sys.argv[1])
settings.bind_cores(3, wish and frozenset(wish))
import torch
threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
settings.bind_cores(3, wish and frozenset(wish))  # as the next run in this process does
everywhere = []
aside = threading.Thread(target=lambda: (settings.unbind_thread(), everywhere.extend(os.sched_getaffinity(0))))
aside.start()
aside.join()
main = sorted(os.sched_getaffinity(0))
print(json.dumps([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], threads, sorted(everywhere), main]))
go_on.set()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
@pytest.mark.parametrize("binds", [True, False], ids=["bound", "free"])
def test_a_process_keeps_to_its_threads_and_cores_with_all_that_runs_in_it(binds, environ):
    wish = sorted(settings.own_cores())[-1:] if binds else None
    command = [sys.executable, "-c", BINDS, json.dumps(wish)]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    threads, variable, affinities, everywhere, main = json.loads(done.stdout)
    assert (threads, variable) == (3, "3")
    assert len(affinities) >= 2
    assert affinities == [wish or sorted(settings.own_cores())] * len(affinities)
    assert (everywhere, main) == (sorted(settings.own_cores()), wish or sorted(settings.own_cores()))
