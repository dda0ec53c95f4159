"""Figures of workloads that do not train."""

from __future__ import annotations

import pytest

from ptdbench.report.page.findings import curves


def result(op, size, busbw, dtype="fp32", mode="blocking"):
    return {"op": op, "dtype": dtype, "reduction": None, "mode": mode, "bytes": size, "busbw": busbw}


def test_collectives_have_a_line_for_each_operation_and_mode():
    blocking = [result("all_gather", 8, 1e9), result("all_gather", 16, 2e9)]
    results = [*blocking, result("all_gather", 8, 3e9, mode="async"), result("barrier", 0, None, dtype=None)]
    (figure,) = curves({"workload": "collectives", "collectives": {"results": results}})
    assert (figure["x"], figure["y"]) == ("bytes", "bus bandwidth (GB/s)")
    assert [(line["name"], line["x"], line["y"]) for line in figure["lines"]] == [
        ("all_gather fp32 blocking", [8, 16], [1.0, 2.0]),
        ("all_gather fp32 async", [8], [3.0]),
    ]


def pair(source, target, bandwidth):
    sizes = [{"bytes": 8, "bandwidth": bandwidth / 2}, {"bytes": 16, "bandwidth": bandwidth}]
    return {"source": source, "target": target, "bandwidth": bandwidth, "sizes": sizes}


def test_of_many_links_the_fastest_and_the_slowest_are_drawn():
    pairs = [pair(0, rank, 1e9 * rank) for rank in range(1, 31)]
    (figure,) = curves({"workload": "p2p", "p2p": {"pairs": pairs}})
    ranks = [int(line["name"].rpartition(" ")[2]) for line in figure["lines"]]
    assert ranks == [30, 29, 28, 27, 26, 25, 6, 5, 4, 3, 2, 1]
    assert figure["lines"][0]["y"] == [15.0, 30.0]


def rank(rates, copy=10e9):
    products = [{"dtype": dtype, "shape": shape, "median": rate} for dtype, shape, rate in rates]
    return {"products": products, "copies": [{"kind": "within the device", "median": copy}] if copy else []}


def test_the_roofline_of_products_is_that_of_the_median_rank():
    shape = "100x100x100"  # 2e6 FLOPs over 3 * 100 * 100 numbers
    ranks = [rank([("fp32", shape, rate), ("bf16", "1x1x1", 1e9)]) for rate in (2e11, 4e11, 3e11)]
    (figure,) = curves({"workload": "matmul", "matmul": {"ranks": ranks}})
    fp32, bf16 = figure["lines"]
    assert (fp32["x"], fp32["y"], fp32["text"]) == (pytest.approx([2e6 / 12e4]), [300.0], [shape])
    assert bf16["x"] == pytest.approx([2 / 6])
    roof, _ = figure["bounds"]
    assert roof["x"] == pytest.approx([7.5, 30.0])  # 3e11 FLOP/s at 1e10 bytes/s is 30 FLOP a byte
    assert roof["y"] == pytest.approx([75.0, 300.0])


def test_without_copies_there_is_no_roof():
    (figure,) = curves({"workload": "matmul", "matmul": {"ranks": [rank([("fp32", "2x2x2", 1e9)], copy=None)]}})
    assert figure["bounds"] == []


@pytest.mark.parametrize(
    "record",
    [
        {"workload": "matmul", "matmul": {"ranks": [rank([("fp8", "2x2x2", 1e9)])]}},
        {"workload": "matmul", "matmul": {"ranks": [rank([("fp32", "square", 1e9)])]}},
        {"workload": "matmul", "matmul": {"ranks": []}},
        {"workload": "collectives", "collectives": {"results": [{"op": "x"}]}},
        {"workload": "collectives", "collectives": []},
        {"workload": "p2p", "p2p": None},
        {"workload": "mine", "mine": {"anything": 1}},
    ],
)
def test_what_is_not_as_it_should_be_has_no_figure(record):
    assert curves(record) == []
