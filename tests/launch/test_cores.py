"""Which cores ranks get, bound by their launcher or not, and that a process keeps to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ptdbench.launch import cores
from tests.conftest import ROOT

FOUR = frozenset({0, 1, 2, 3})


def shares(of_ranks, wanted):
    """What each rank of a node gets."""
    return [cores.share(of_ranks, rank, wanted) for rank in range(len(of_ranks))]


class TestShare:
    def test_ranks_that_are_free_divide_the_threads_and_stay_free(self):
        assert shares([FOUR, FOUR], "auto") == [(2, None)] * 2

    def test_ranks_that_are_free_get_cores_of_their_own_where_a_number_is_asked_for(self):
        assert shares([FOUR, FOUR], 2) == [(2, {0, 1}), (2, {2, 3})]
        assert shares([FOUR, FOUR], 1) == [(1, {0}), (1, {1})]

    def test_cores_need_not_follow_each_other(self):
        odd = frozenset({9, 1, 5, 13})
        assert shares([odd, odd], 2) == [(2, {1, 5}), (2, {9, 13})]

    def test_ranks_that_their_launcher_has_bound_keep_to_their_cores(self):
        bound = [frozenset({0, 1, 2}), frozenset({4, 5, 6})]
        assert shares(bound, "auto") == [(3, None)] * 2
        assert shares(bound, 2) == [(2, {0, 1}), (2, {4, 5})]

    def test_pairs_of_ranks_that_share_a_socket(self):
        sockets = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1}), frozenset({2, 3})]
        assert shares(sockets, "auto") == [(1, None)] * 4
        assert shares(sockets, 1) == [(1, {0}), (1, {2}), (1, {1}), (1, {3})]

    def test_where_cores_overlap_in_part_nobody_is_bound(self):
        """Two ranks might be bound to the same core, each counting in its own set."""
        overlapping = [frozenset({0, 1, 2, 3}), frozenset({2, 3, 4, 5})]
        assert shares(overlapping, "auto") == [(2, None)] * 2
        assert shares(overlapping, 2) == [(2, None)] * 2

    def test_where_there_are_too_few_cores_the_threads_are_as_asked_and_nobody_is_bound(self):
        assert shares([FOUR, FOUR, FOUR], 2) == [(2, None)] * 3
        assert shares([frozenset({0})], 4) == [(4, None)]

    def test_a_rank_has_one_thread_at_least(self):
        assert shares([frozenset({7})] * 3, "auto") == [(1, None)] * 3


#: Binds itself while a thread of its own runs, and tells where each thread may run then.
BINDS = """
import json, os, sys, threading
from ptdbench.launch import cores

go_on = threading.Event()
threading.Thread(target=go_on.wait, daemon=True).start()
wish = json.loads(sys.argv[1])
cores.bind(3, wish and frozenset(wish))
import torch
threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
cores.bind(3, wish and frozenset(wish))  # as the next run in this process does
everywhere = []
aside = threading.Thread(target=lambda: (cores.unbind_thread(), everywhere.extend(os.sched_getaffinity(0))))
aside.start()
aside.join()
main = sorted(os.sched_getaffinity(0))
print(json.dumps([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], threads, sorted(everywhere), main]))
go_on.set()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
@pytest.mark.parametrize("binds", [True, False], ids=["bound", "free"])
def test_a_process_keeps_to_its_threads_and_cores_with_all_that_runs_in_it(binds, environ):
    wish = sorted(cores.mine())[-1:] if binds else None
    command = [sys.executable, "-c", BINDS, json.dumps(wish)]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    threads, variable, affinities, everywhere, main = json.loads(done.stdout)
    assert (threads, variable) == (3, "3")
    assert len(affinities) >= 2
    assert affinities == [wish or sorted(cores.mine())] * len(affinities)
    assert (everywhere, main) == (sorted(cores.mine()), wish or sorted(cores.mine()))
