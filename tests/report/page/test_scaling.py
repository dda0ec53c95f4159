"""Curves of throughput over ranks."""

from __future__ import annotations

import pytest

from ptdbench.report.page.scaling import curves


def row(number, ranks, rate, batch=16, parallel="ddp", sweep="a", nodes=1):
    found = {"number": number, "ranks": ranks, "rate": rate, "batch": batch}
    return found | {"parallel": parallel, "sweep": sweep, "nodes": nodes}


def brief(found):
    return [(curve["kind"], curve["name"], curve["rows"], curve["efficiency"]) for curve in found]


def test_strong_scaling_by_ranks_in_their_order():
    rows = [row(0, 4, 300.0), row(1, 1, 100.0), row(2, 2, 180.0)]
    assert brief(curves(rows, {})) == [("strong", "ddp, batch 16", [1, 2, 0], [1.0, 0.9, 0.75])]


def test_weak_scaling_keeps_the_batch_of_a_rank():
    rows = [row(0, 1, 100.0, batch=8), row(1, 2, 150.0, batch=16)]
    assert brief(curves(rows, {})) == [("weak", "ddp, 8 a rank", [0, 1], [1.0, 0.75])]


def test_each_way_of_parallelizing_and_each_option_has_a_curve_of_its_own():
    rows = [row(n, ranks, 1.0 * ranks, parallel=p) for n, (p, ranks) in enumerate([("ddp", 1), ("ddp", 2), ("tp", 2)])]
    assert [curve["rows"] for curve in curves(rows, {})] == [[0, 1]]
    rows = [row(n, ranks, 1.0 * ranks) for n, ranks in enumerate([1, 2, 1, 2])]
    found = curves(rows, {"activations": ["keep", "keep", "recompute", "recompute"]})
    assert {curve["name"]: curve["rows"] for curve in found} == {
        "ddp activations=keep, batch 16": [0, 1],
        "ddp activations=recompute, batch 16": [2, 3],
    }


@pytest.mark.parametrize(
    "options",
    [{"cluster.ranks_per_node": ["1", "2"]}, {"parallel.tensor": ["1", "2"]}, {"train.micro_batch": ["1", "2"]}],
)
def test_options_of_size_are_part_of_one_curve(options):
    assert [curve["rows"] for curve in curves([row(0, 1, 1.0), row(1, 2, 2.0)], options)] == [[0, 1]]


def test_rows_with_the_same_ranks_stand_on_curves_by_how_ranks_are_divided():
    rows = [row(n, ranks, 10.0 * ranks, parallel="tp") for n, ranks in enumerate([4, 8, 4, 8])]
    found = curves(rows, {"parallel.tensor": ["2", "2", "4", "4"]})
    assert sorted(curve["rows"] for curve in found) == [[0, 1], [2, 3]]


def test_two_sweeps_make_one_curve_unless_they_have_the_same_point():
    apart = [row(0, 1, 1.0, sweep="a"), row(1, 2, 2.0, sweep="b")]
    assert [curve["rows"] for curve in curves(apart, {})] == [[0, 1]]
    twice = [*apart, row(2, 2, 3.0, sweep="a")]
    assert [curve["rows"] for curve in curves(twice, {})] == [[0, 2]]


def test_micro_batches_and_nodes_make_curves_of_their_own():
    rows = [row(n, ranks, 1.0 * ranks) for n, ranks in enumerate([1, 2, 4, 1, 2, 4])]
    found = curves(rows, {"train.micro_batch": ["4"] * 3 + ["8"] * 3, "cluster.ranks_per_node": list("124124")})
    assert sorted(curve["rows"] for curve in found) == [[0, 1, 2], [3, 4, 5]]
    wide = [row(0, 1, 1.0), row(1, 2, 2.0), row(2, 4, 4.0), row(3, 4, 3.0, nodes=2)]
    found = curves(wide, {"cluster.nodes": list("1112"), "cluster.ranks_per_node": list("1242")})
    assert [curve["rows"] for curve in found] == [[0, 1, 2]]


def test_what_has_no_throughput_or_stands_alone_is_no_curve_and_of_the_same_the_faster_counts():
    assert curves([row(0, 1, None), row(1, 2, 2.0)], {}) == []
    assert curves([row(0, 1, 1.0), row(1, 2, 2.0)], {"cluster.partition": ["a", "b"]}) == []
    rows = [row(0, 1, 1.0), row(1, 2, 1.5), row(2, 2, 1.8)]
    assert [curve["rows"] for curve in curves(rows, {})] == [[0, 2]]


def test_the_fastest_curve_comes_first():
    rows = [row(0, 1, 1.0), row(1, 2, 2.0), row(2, 1, 5.0, parallel="tp"), row(3, 2, 6.0, parallel="tp")]
    assert [curve["rows"] for curve in curves(rows, {})] == [[2, 3], [0, 1]]
