"""The table of ``workload=hello``."""

from __future__ import annotations

import pytest

from ptdbench.report.workload_tables import hello_table, ranges


def rank(number, **changes):
    told = {
        "rank": number,
        "local_rank": number % 2,
        "local_size": 2,
        "node": f"n{1 + number // 2}",
        "host": "vm",
        "device": "cpu",
        "cores": [0, 1],
        "threads": 1,
        "settings": {"OMP_NUM_THREADS": "1"},
    }
    return {**told, **changes}


def shown(*ranks, width=100):
    hello = {"launcher": "srun", "backend": "gloo", "address": "n1", "port": 29400, "ranks": list(ranks)}
    return hello_table(hello, width).splitlines()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 3, 8], "0-3,8"),
        ([8, 2, 0, 1], "0-2,8"),
        ([0, 2, 4], "0,2,4"),
        ([0, 1, 64, 65, 127], "0-1,64-65,127"),
    ],
)
def test_numbers_that_follow_each_other_are_ranges(numbers, text):
    assert ranges(numbers) == text


def test_the_title_says_how_many_where_and_over_what():
    title, *_ = shown(rank(0), rank(1), rank(2), rank(3))
    assert title == "4 ranks on 2 nodes, started by srun, over gloo at n1:29400"
    title, *_ = shown(rank(0))
    assert title.startswith("1 rank on 1 node, ")


def test_every_rank_has_a_row():
    lines = shown(rank(0), rank(1, cores=[2, 3, 8], threads=3), rank(2, device="cuda:0 NVIDIA H200", host="gpu07"))
    assert [line.split() for line in lines[3:6]] == [
        ["0", "0", "2", "n1", "vm", "cpu", "0-1", "1"],
        ["1", "1", "2", "n1", "vm", "cpu", "2-3,8", "3"],
        ["2", "0", "2", "n2", "gpu07", "cuda:0", "NVIDIA", "H200", "0-1", "1"],
    ]


def test_a_setting_that_all_share_is_said_once():
    assert shown(rank(0), rank(1))[5:] == ["OMP_NUM_THREADS=1"]


def test_settings_that_differ_are_said_with_their_ranks():
    one, other = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}
    lines = shown(rank(0, settings=one), rank(1, settings=other), rank(2, settings=one), rank(3, settings=one))
    assert lines[7:] == [
        "NCCL_DEBUG=INFO  (ranks 0,2-3)",
        "NCCL_DEBUG=(not set)  (rank 1)",
        "OMP_NUM_THREADS=1  (ranks 0,2-3)",
        "OMP_NUM_THREADS=4  (rank 1)",
    ]


def test_nothing_is_cut_where_the_terminal_is_narrow():
    name = "a-node-with-a-name-as-long-as-clouds-give-them.internal"
    assert any(name in line for line in shown(rank(0, node=name), width=60))
