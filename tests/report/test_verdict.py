"""What a person reads after ``workload=check``."""

from __future__ import annotations

import pytest

from ptdbench.report import table
from ptdbench.report.workload_tables import check_verdict
from tests.report.test_ceilings import matmul

HELLO = {
    "launcher": "srun", "backend": "gloo", "address": "n1", "port": 29400,
    "ranks": [
        {
            "rank": rank, "local_rank": rank, "local_size": 2, "node": "n1", "host": "vm", "device": "cpu",
            "cores": [rank], "threads": 1, "settings": {},
        }
        for rank in (0, 1)
    ],
}  # fmt: skip
PAIRS = [
    {"source": 0, "target": 1, "bandwidth": 12e9, "latency": 2e-6},
    {"source": 1, "target": 0, "bandwidth": 9e9, "latency": 3e-6},
]
ROW = {"op": "all_reduce", "bytes": 2**20, "seconds": {"median": 0.0012}}


def check(*texts, attempts=1, **changes):
    found = {
        "sound": not texts,
        "findings": [{"kind": "slow rank", "ranks": [1], "text": text} for text in texts],
        "remarks": [],
        "tolerance": 0.05,
        "attempts": {"matmul": attempts, "p2p": 1},
        "hello": HELLO,
        "versions": {"torch": "2.15.0", "nccl": None},
        "matmul": matmul(7e14, 7e14),
        "p2p": {"pairs": PAIRS},
        "collectives": {"results": [ROW]},
    }
    return {**found, **changes}


def test_a_sound_cluster():
    lines = check_verdict(check(), 100).splitlines()
    assert lines[0] == "2 ranks on 1 node, started by srun, over gloo at n1:29400"
    assert lines[-1] == "verdict       sound (tolerance 5%)"
    assert lines[-2] == "versions      torch 2.15.0"
    assert "all_reduce    1 MiB: 1,200 us, its result checked" in lines


def test_the_slowest_link_is_named():
    text = "links         12 GB/s at most, rank 1 to rank 0 least with 9 GB/s; latency 2 to 3 us"
    assert text in check_verdict(check(), 100).splitlines()


def test_every_finding_has_a_line_after_the_verdict():
    lines = check_verdict(check("rank 1 is slow", "torch differs", attempts=5), 120).splitlines()
    again = "what looked slow was measured 5 times, and the best counts"
    assert lines[-3:] == [
        f"verdict       unsound, 2 findings (tolerance 5%; {again})",
        "  - rank 1 is slow",
        "  - torch differs",
    ]


def test_a_busy_machine_is_called_so():
    busy = "other processes took 1.1 of 2 cores; measure again on a quiet machine"
    lines = check_verdict(check("rank 1 is slow", verdict="busy", busy=busy), 120).splitlines()
    assert lines[-2:] == [f"verdict       busy: {busy} (tolerance 5%)", "  - rank 1 is slow"]


def test_long_findings_fold_and_lose_nothing():
    text = check_verdict(check("a word " * 60), 80)
    assert text.count("word") == 60
    assert max(len(line) for line in text.partition("verdict")[2].splitlines()) <= 80


def test_remarks_are_notes():
    assert "note          a single rank has no links" in check_verdict(
        check(remarks=["a single rank has no links"]), 100
    )


@pytest.mark.parametrize("changes", [{"p2p": None, "collectives": None}, {"p2p": {"pairs": []}}])
def test_one_rank_has_no_links_to_show(changes):
    assert "links " not in check_verdict(check(**changes), 100)


def test_an_unsound_run_shows_its_figures_and_why_it_failed():
    error = {"rank": 0, "type": "Unsound", "message": "rank 1 is slow", "traceback": ""}
    record = {
        "workload": "check", "model": None, "status": "failed", "error": error, "check": check("rank 1 is slow"),
        "config": {"workload": {"_target_": "ptdbench.workloads.check.Check"}},
    }  # fmt: skip
    lines = table.render([record]).splitlines()
    assert lines[-2:] == ["  - rank 1 is slow", "check: failed on rank 0: Unsound: rank 1 is slow"]


def test_a_run_that_broke_off_shows_why():
    error = {"rank": 1, "type": "ArithmeticError", "message": "wrong", "traceback": ""}
    record = {"workload": "check", "model": None, "status": "failed", "error": error}
    assert table.render([record]) == "check: failed on rank 1: ArithmeticError: wrong"
