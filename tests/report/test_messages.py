"""The tables of ``workload=p2p`` and ``workload=collectives``."""

from __future__ import annotations

import re

import pytest

from ptdbench.report.workload_tables import collectives_tables, p2p_tables
from ptdbench.units import size_text, time_text
from ptdbench.workloads.collectives import definitions


@pytest.mark.parametrize(
    ("size", "text"),
    [(8, "8 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**26, "64 MiB"), (3 * 2**30, "3 GiB")],
)
def test_sizes(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5e-5, "15.0 µs"),
        (9.99e-4, "999 µs"),
        (9.996e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (75, "75.0 s"),
    ],
)
def test_times(seconds, text):
    assert time_text(seconds) == text


def row(op="all_reduce", size=2**20, mode="blocking", **changes):
    moves = op != "barrier"
    return {
        "op": op,
        "dtype": "fp32" if moves else None,
        "reduction": "sum" if op == "all_reduce" else None,
        "mode": mode,
        "bytes": size if moves else 0,
        "ranks": 4,
        "repetitions": 10,
        "seconds": {"median": 1e-3, "p5": 9e-4, "p95": 2e-3},
        "algbw": 2e9 if moves else None,
        "busbw": 3e9 if moves else None,
    } | changes


def collectives(*results, **changes):
    return {
        "group": "all",
        "groups": [[0, 1, 2, 3]],
        "definitions": definitions(),
        "results": list(results),
        "fits": [],
        "cut": [],
        "left_out": [],
    } | changes


def cells(text, beginning):
    (line,) = [line for line in text.splitlines() if line.startswith(beginning)]
    return re.split(r"\s{2,}", line.strip())


def test_the_figures_of_a_size():
    text = collectives_tables(collectives(row(), row("barrier")), 100)
    assert text.startswith("1 group of 4 ranks; every result was checked\n")
    assert cells(text, "all_reduce fp32 sum blocking") == [
        "all_reduce fp32 sum blocking", "1 MiB", "1.00 ms", "900 µs", "2.00 ms", "2.00", "3.00",
    ]  # fmt: skip
    assert cells(text, "barrier blocking") == ["barrier blocking", "-", "1.00 ms", "900 µs", "2.00 ms", "-", "-"]


def test_definitions_stand_beside_the_figures():
    text = collectives_tables(collectives(row(), row("gather"), row("all_gather")), 100)
    assert "algbw = bytes / median seconds, after nccl-tests, doc/PERFORMANCE.md; n = 4 ranks" in text
    assert "busbw = algbw * 2(n-1)/n: all_reduce" in text
    assert "busbw = algbw * (n-1)/n: gather, all_gather" in text
    assert "broadcast" not in text


def test_of_many_sizes_the_first_and_the_last_are_shown_and_the_rest_is_admitted():
    ops = ("broadcast", "reduce", "gather", "scatter", "all_gather")
    text = collectives_tables(collectives(*(row(op, 8 * 2**power) for op in ops for power in range(26))), 100)
    for op in ops:
        assert cells(text, f"{op} fp32")[1] == "8 B"
    assert text.count("256 MiB") == len(ops)
    assert "130 figures, not all of them shown" in text
    assert len(text.splitlines()) < 100


def test_the_fit_with_its_doubts():
    series = {"op": "all_reduce", "dtype": "fp32", "reduction": "sum", "mode": "blocking"}
    line = {"alpha": 2e-5, "beta": 5e-10, "alpha_error": 1e-6, "beta_error": 1e-12}
    fit = {**series, **line, "r2": 0.98765, "max_relative_error": 0.123, "points": 26}
    text = collectives_tables(collectives(fits=[fit]), 100)
    assert cells(text, "all_reduce")[1:] == ["20.0", "1.00", "2.00", "0.988", "12%", "26"]


def test_what_was_cut_and_left_out_is_said():
    cut = {
        "op": "gather",
        "dtype": "fp32",
        "reduction": None,
        "mode": "async",
        "from_bytes": 2**28,
        "reason": "too long",
    }
    text = collectives_tables(collectives(row(), cut=[cut], left_out=["reduce", "scatter"]), 100)
    assert "gather fp32 async: not from 256 MiB on: too long" in text
    assert "left out, not in this backend: reduce, scatter" in text


def test_several_groups_are_said_to_work_at_once():
    text = collectives_tables(collectives(row(), group="data", groups=[[0, 2], [1, 3]]), 100)
    assert text.startswith("2 groups of 2 ranks (data), at the same time; ")


def pair(source, target, latency=2e-5, bandwidth=1.5e9):
    sizes = [{"bytes": 2**26, "seconds": {"median": 0.04}, "bandwidth": bandwidth}]
    return {"source": source, "target": target, "latency": latency, "bandwidth": bandwidth, "sizes": sizes}


def p2p(ranks, **changes):
    pairs = [pair(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    both = [{"ranks": [a, b], "sizes": pair(a, b)["sizes"]} for a in range(ranks) for b in range(a + 1, ranks)]
    return {"pairs": pairs, "both": both, "overlap": [], "cut": []} | changes


def test_a_matrix_by_pair():
    figures = p2p(2, pairs=[pair(0, 1, 2e-5, 1.5e9), pair(1, 0, 3e-5, None)])
    latency, bandwidth, both = p2p_tables(figures, 100).split("\n\n")
    assert latency.splitlines()[0] == "latency in µs, from row to column"
    assert [line.split() for line in latency.splitlines()[3:]] == [["0", "-", "20.0"], ["1", "30.0", "-"]]
    assert bandwidth.splitlines()[0] == "bandwidth at 64 MiB in GB/s, from row to column"
    assert [line.split() for line in bandwidth.splitlines()[3:]] == [["0", "-", "1.50"], ["1", "-", "-"]]
    assert cells(both, "0 and 1") == ["0 and 1", "64 MiB", "40.0 ms", "1.50"]


def test_of_many_pairs_the_slowest_are_shown():
    many = p2p(12)
    many["pairs"][50] = pair(4, 7, bandwidth=1e8)
    text = p2p_tables(many, 100)
    first = text.split("\n\n")[0].splitlines()
    assert first[0] == "the 10 slowest of 132 pairs, bandwidth at 64 MiB in GB/s"
    assert first[3].split() == ["4", "7", "20.0", "0.100"]
    assert len(first) == 13
    assert "both directions at once, the 10 slowest of 66 pairs" in text


def test_overlap_says_what_is_hidden():
    told = {
        "ranks": [0, 1],
        "bytes": 2**20,
        "communication": 1e-3,
        "computation": 1e-3,
        "together": 1.5e-3,
        "hidden": 0.5,
    }
    text = p2p_tables(p2p(2, overlap=[told]), 100)
    assert cells(text.split("\n\n")[-1], "0 and 1") == ["0 and 1", "1 MiB", "1.00 ms", "1.00 ms", "1.50 ms", "50%"]


def test_nothing_measured_is_no_error():
    nothing = {"source": 0, "target": 1, "latency": None, "bandwidth": None, "sizes": []}
    cut = [{"source": 0, "target": 1, "from_bytes": 8, "reason": "too long"}]
    text = p2p_tables({"pairs": [nothing], "both": [{"ranks": [0, 1], "sizes": []}], "overlap": [], "cut": cut}, 100)
    assert "rank 0 to rank 1: not from 8 B on: too long" in text
