"""The tables of workloads that do not train."""

import re

import pytest
from msgspec import convert

from ptdbench.measure.results import P2P, Check, Collectives, Hello, Matmul
from ptdbench.report import table
from ptdbench.report.table import (
    check_verdict,
    collectives_tables,
    hello_table,
    matmul_tables,
    p2p_tables,
    ranges,
)
from tests.report.made import made


def cells(text, beginning):
    (line,) = [line for line in text.splitlines() if line.startswith(beginning)]
    return re.split(r"\s{2,}", line.strip())


def rank(number, **changes):
    told = {
        "rank": number, "local_rank": number % 2, "local_size": 2, "node": f"n{1 + number // 2}", "host": "vm",
        "device": "cpu", "cores": [0, 1], "threads": 1, "settings": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    return told | changes


def hello(*ranks):
    return {"launcher": "srun", "backend": "gloo", "address": "n1", "port": 29400, "ranks": list(ranks)}


class TestHello:
    @pytest.mark.parametrize(
        ("numbers", "text"), [([], ""), ([5], "5"), ([8, 2, 0, 1], "0-2,8"), ([0, 1, 64, 65, 127], "0-1,64-65,127")]
    )
    def test_numbers_that_follow_each_other_are_ranges(self, numbers, text):
        assert ranges(numbers) == text

    def test_every_rank_has_a_row_and_what_all_share_is_said_once(self):
        name = "a-node-with-a-name-as-long-as-clouds-give-them.internal"  # which is not cut
        ranks = rank(0), rank(1, cores=[2, 3, 8], threads=3), rank(2, device="cuda:0 H200", node=name)
        title, _, _, *rows, setting = hello_table(convert(hello(*ranks), Hello), 110).splitlines()
        assert title == "3 ranks on 2 nodes, started by srun, over gloo at n1:29400"
        assert [line.split() for line in rows] == [
            ["0", "0", "2", "n1", "vm", "cpu", "0-1", "1"],
            ["1", "1", "2", "n1", "vm", "cpu", "2-3,8", "3"],
            ["2", "0", "2", name, "vm", "cuda:0", "H200", "0-1", "1"],
        ]
        assert setting == "OMP_NUM_THREADS=1"

    def test_settings_that_differ_are_said_with_their_ranks(self):
        one, other = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}
        ranks = [rank(number, settings=settings) for number, settings in enumerate((one, other, one, one))]
        assert hello_table(convert(hello(*ranks), Hello), 100).splitlines()[7:] == [
            "NCCL_DEBUG=INFO  (ranks 0,2-3)", "NCCL_DEBUG=(not set)  (rank 1)", "OMP_NUM_THREADS=1  (ranks 0,2-3)",
            "OMP_NUM_THREADS=4  (rank 1)",
        ]  # fmt: skip


def product(median, **names):
    return {**names, "repetitions": 10, "mean": 0.9 * median, "median": median, "maximum": 1.1 * median}


def matmul(*medians, **ceiling):
    ranks = [
        {
            "rank": number,
            "device": "NVIDIA H200",
            "products": [product(median, dtype="bf16", shape="8x8x8"), product(1e12, dtype="bf16", shape="4x4x4")],
        }
        for number, median in enumerate(medians)
    ]
    best = {
        "device": "NVIDIA H200", "driver": "550", "torch": "2.15", "dtype": "bf16", "threads": None, "ranks": 2,
        "shape": "8x8x8", "flops_per_second": 7.5e14, "share_of_peak": 0.758, "peak_reason": None,
    }  # fmt: skip
    return {"ranks": ranks, "ceilings": [best | ceiling], "kept": None}


class TestMatmul:
    def test_figures_are_medians_over_the_ranks_and_the_slowest_is_named(self):
        text = matmul_tables(convert(matmul(800e12, 600e12, 700e12), Matmul), 100)
        (row,) = [line.split() for line in text.splitlines() if line.startswith("bf16") and "best" in line]
        assert row == ["bf16", "8x8x8", "(best)", "630", "700", "770", "600", "(rank", "1)", "10x"]
        assert "matrix products on 3 ranks at once (NVIDIA H200): TFLOP/s of a rank" in text

    @pytest.mark.parametrize(
        ("ceiling", "said"),
        [
            ({}, "NVIDIA H200: 750 TFLOP/s in bf16 (8x8x8), 75.8% of the peak"),
            ({"device": "AMD EPYC", "threads": 1, "flops_per_second": 5.9e10, "share_of_peak": None,
              "peak_reason": "a CPU has no data-sheet peak"},
             "AMD EPYC, 1 thread: 0.059 TFLOP/s in bf16 (8x8x8), no share of a peak: a CPU has no data-sheet peak"),
        ],
    )  # fmt: skip
    def test_the_ceiling_beside_the_peak(self, ceiling, said):
        assert matmul_tables(convert(matmul(800e12, **ceiling), Matmul), 100).splitlines()[-1] == f"ceiling of {said}"

    def test_what_was_not_kept_is_said(self):
        text = matmul_tables(convert(matmul(1e12) | {"kept": "not cached: no room"}, Matmul), 100)
        assert text.endswith("not cached: no room")


def collective(op="all_reduce", size=2**20, **changes):
    moves = op != "barrier"
    return {
        "op": op, "dtype": "fp32" if moves else None, "reduction": "sum" if op == "all_reduce" else None,
        "bytes": size if moves else 0, "ranks": 4, "repetitions": 10,
        "seconds": {"median": 1e-3, "p5": 9e-4, "p95": 2e-3}, "algbw": 2e9 if moves else None,
        "busbw": 3e9 if moves else None,
    } | changes  # fmt: skip


def collectives(*results, **changes):
    found = {"group": "all", "groups": [[0, 1, 2, 3]], "results": list(results)}
    found |= {"left_out": []} | changes
    return collectives_tables(convert(found, Collectives), 100)


class TestCollectives:
    def test_the_figures_of_a_size(self):
        text = collectives(collective(), collective("barrier"))
        assert text.startswith("1 group of 4 ranks; every result was checked\n")
        assert cells(text, "all_reduce fp32 sum") == [
            "all_reduce fp32 sum", "1 MiB", "1.00 ms", "900 µs", "2.00 ms", "2.00", "3.00",
        ]  # fmt: skip
        assert cells(text, "barrier") == ["barrier", "-", "1.00 ms", "900 µs", "2.00 ms", "-", "-"]

    def test_of_many_sizes_the_first_and_the_last_are_shown_and_the_rest_is_admitted(self):
        ops = ("broadcast", "reduce", "gather", "scatter", "all_gather")
        text = collectives(*(collective(op, 8 * 2**power) for op in ops for power in range(26)))
        for op in ops:
            assert cells(text, f"{op} fp32")[1] == "8 B"
        assert text.count("256 MiB") == len(ops)
        assert "130 figures, not all of them shown" in text
        assert len(text.splitlines()) < 100

    def test_several_groups_and_what_was_left_out_are_said(self):
        groups = {"group": "data", "groups": [[0, 2], [1, 3]]}
        text = collectives(collective(), left_out=["reduce", "scatter"], **groups)
        assert text.startswith("2 groups of 2 ranks (data), at the same time; ")
        assert "left out, not in this backend: reduce, scatter" in text


def link(source, target, latency=2e-5, bandwidth=1.5e9):
    size = {"bytes": 2**26, "repetitions": 5, "seconds": {"median": 0.04}, "one_way": 0.04, "bandwidth": bandwidth}
    pair = {"source": source, "target": target, "latency": latency, "bandwidth": bandwidth}
    return {**pair, "sizes": [size]}


def p2p(ranks, **changes):
    pairs = [link(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return {"pairs": pairs} | changes


class TestLinks:
    def test_a_matrix_by_pair(self):
        figures = p2p(2, pairs=[link(0, 1, 2e-5, 1.5e9), link(1, 0, 3e-5, 2e9)])
        latency, bandwidth = p2p_tables(convert(figures, P2P), 100).split("\n\n")
        assert latency.splitlines()[0] == "latency in µs, from row to column"
        assert [line.split() for line in latency.splitlines()[3:]] == [["0", "-", "20.0"], ["1", "30.0", "-"]]
        assert bandwidth.splitlines()[0] == "bandwidth at 64 MiB in GB/s, from row to column"
        assert [line.split() for line in bandwidth.splitlines()[3:]] == [["0", "-", "1.50"], ["1", "2.00", "-"]]

    def test_of_many_pairs_the_slowest_are_shown(self):
        many = p2p(12)
        many["pairs"][50] = link(4, 7, bandwidth=1e8)
        text = p2p_tables(convert(many, P2P), 100)
        first = text.split("\n\n")[0].splitlines()
        assert first[0] == "the 10 slowest of 132 pairs, bandwidth at 64 MiB in GB/s"
        assert first[3].split() == ["4", "7", "20.0", "0.100"]
        assert len(first) == 13


def check(*texts, attempts=1, **changes):
    found = {
        "sound": not texts,
        "verdict": "unsound" if texts else "sound",
        "busy": None,
        "findings": [{"kind": "slow rank", "ranks": [1], "text": text} for text in texts],
        "remarks": [],
        "tolerance": 0.05,
        "attempts": {"matmul": attempts, "p2p": 1},
        "other_load": {},
        "hello": hello(rank(0), rank(1)),
        "versions": {"torch": "2.15.0", "nccl": None},
        "matmul": matmul(7e14, 7e14),
        "p2p": p2p(2, pairs=[link(0, 1, 2e-6, 12e9), link(1, 0, 3e-6, 9e9)]),
        "collectives": {
            "group": "all", "groups": [[0, 1]], "results": [collective()], "left_out": [],
        },
    }  # fmt: skip
    return found | changes


def verdict(*texts, width=120, **changes):
    return check_verdict(convert(check(*texts, **changes), Check), width).splitlines()


class TestCheck:
    def test_a_sound_cluster(self):
        lines = verdict(remarks=["the fabric is shared"], width=100)
        assert lines[0] == "2 ranks on 1 node, started by srun, over gloo at n1:29400"
        assert "links         12 GB/s at most, rank 1 to rank 0 least with 9 GB/s; latency 2 to 3 µs" in lines
        assert "all_reduce    1 MiB: 1,000 µs, its result checked" in lines
        assert lines[-3:] == [
            "versions      torch 2.15.0", "note          the fabric is shared", "verdict       sound (tolerance 5%)",
        ]  # fmt: skip

    def test_findings_fold_after_the_verdict_and_a_busy_machine_is_called_so(self):
        lines = verdict("rank 1 is slow", "torch differs", attempts=5)
        again = "what looked slow was measured 5 times, and the best counts"
        assert lines[-3:] == [
            f"verdict       unsound, 2 findings (tolerance 5%; {again})",
            "  - rank 1 is slow",
            "  - torch differs",
        ]
        busy = "other processes took 1.1 of 2 cores; measure again on a quiet machine"
        lines = verdict("rank 1 is slow", verdict="busy", busy=busy)
        assert lines[-2:] == [f"verdict       busy: {busy} (tolerance 5%)", "  - rank 1 is slow"]
        text = "\n".join(verdict("a word " * 60, width=80))
        assert text.count("word") == 60
        assert max(len(line) for line in text.partition("verdict")[2].splitlines()) <= 80

    @pytest.mark.parametrize("changes", [{"p2p": None, "collectives": None}, {"p2p": p2p(2, pairs=[])}])
    def test_one_rank_has_no_links_to_show(self, changes):
        assert not [line for line in verdict(**changes) if line.startswith("links ")]

    def test_a_run_that_failed_shows_its_figures_if_it_has_any_and_why(self):
        error = {"rank": 0, "type": "Unsound", "message": "rank 1 is slow", "traceback": ""}
        config = {"workload": {"_target_": "ptdbench.workloads.check.Check"}}
        record = made({"workload": "check", "status": "failed", "error": error, "config": config})
        said = "check: failed on rank 0: Unsound: rank 1 is slow"
        assert table.render([record]) == said
        record |= {"check": check("rank 1 is slow")}
        assert table.render([record]).splitlines()[-1] == "  - rank 1 is slow"  # the verdict, once
        record |= {"error": error | {"type": "ArithmeticError", "message": "a wrong sum"}}
        lines = table.render([record]).splitlines()
        assert lines[-2:] == ["  - rank 1 is slow", "check: failed on rank 0: ArithmeticError: a wrong sum"]
