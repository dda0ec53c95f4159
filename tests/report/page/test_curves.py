"""Curves as they are drawn: steps and losses, and scaling."""

import math

import numpy as np
import pytest

from ptdbench.comparison.alternatives import Alternative
from ptdbench.comparison.ranking import Standing
from ptdbench.records import series
from ptdbench.report.columns import Row
from ptdbench.report.page.curves import Point, of_steps, scaling_curves
from tests.report.made import made


def shown(*runs):
    return of_steps({number: Row(Standing(Alternative([run], {})), f"run{number}") for number, run in enumerate(runs)})


@pytest.fixture
def trained(tmp_path):
    """What is drawn of runs with these losses, and step times if they are given; options have a value for each."""

    def write(*losses, seconds=None, options=None, **fields):
        runs = []
        for number, values in enumerate(losses):
            directory = tmp_path / str(number)
            directory.mkdir()
            rows = series.unknown(len(values), 1)
            rows["loss"] = values
            rows["step_seconds"][:, 0] = 0.1 if seconds is None else seconds
            series.write(directory / series.NAME, [rows])
            config = {name: of_runs[number] for name, of_runs in (options or {}).items()}
            record = {"steps": len(values), "precision": "fp32", "config": config}
            runs.append(made({**record, **fields, "directory": str(directory)}))
        return shown(*runs)

    return write


def test_short_runs_are_drawn_whole(trained):
    (curve,) = trained([3.0, 2.0, float("nan")], seconds=[0.3, 0.2, 0.1])["steps"]
    assert curve == {"number": 0, "step": [1, 2, 3], "seconds": [0.3, 0.2, 0.1], "loss": [3.0, 2.0, None]}


def test_of_long_runs_the_extremes_and_the_last_step_stay(trained):
    seconds = np.full(10_000, 0.1)
    seconds[[4321, 8765]] = 9.0, 0.01
    losses = np.linspace(5, 1, 10_000)
    losses[[2222, 3333]] = 50.0, math.nan
    (curve,) = trained(losses, seconds=seconds)["steps"]
    assert len(curve["step"]) <= 400
    assert dict(zip(curve["step"], curve["loss"], strict=True))[2223] == 50.0
    drawn = dict(zip(curve["step"], curve["seconds"], strict=True))
    assert (drawn[4322], drawn[8766], curve["step"][0], curve["step"][-1]) == (9.0, 0.01, 1, 10_000)
    assert curve["step"] == sorted(set(curve["step"]))


@pytest.mark.parametrize(("losses", "said"), [
    ([[3.0, 0.0], [3.0, 0.0]], "agree with run0 exactly (1 row, 2 steps)"),
    ([[3.0, 2.0], [3.0, 2.0], [3.0, 2.0 * (1 + 4e-6)]], "agree with run0 within 4.0e-06 (2 rows, 2 steps)"),
    ([[3.0, 2.0, 1.0], [3.0, 2.0]], "agree with run0 exactly (1 row, common steps)"),
    ([[3.0, 2.0], [3.0, 2.2], [3.0, 2.4], [3.0, 2.0]],
     "differ from run0, relative: run2 0.2, run1 0.1, others exactly (3 rows, 2 steps)"),
])  # fmt: skip
def test_losses_are_compared_as_far_as_all_came_and_the_farthest_named_first(trained, losses, said):
    assert trained(*losses)["losses"] == [f"losses {said}"]


def test_of_many_rows_the_first_are_drawn_and_all_are_compared(trained):
    found = trained(*[[1.0]] * 45, [1.5])
    assert [curve["number"] for curve in found["steps"]] == list(range(found["drawn"]))
    assert found["drawn"] == 40
    assert found["losses"] == ["losses differ from run0, relative: run45 0.5, others exactly (45 rows, 1 step)"]


def test_losses_that_are_not_finite_are_named_and_the_others_compared(trained):
    nan, infinite = float("nan"), float("inf")
    found = trained([3.0, infinite], [3.0, 2.0], [3.0, 2.0], [nan, nan])["losses"]
    assert found == [
        "losses agree with run1 exactly (1 row, 2 steps)",
        "losses missing or not finite: run0 from step 2, run3 from step 1",
    ]


def test_each_training_by_itself_and_a_run_alone_not_at_all(trained):
    options = {"optimizer.lr": [1, 2, 1, 3, 3], "parallel": ["ddp", "ddp", "tp", "ddp", "tp"]}
    assert trained([3.0], [9.0], [3.0], [5.0], [5.5], options=options)["losses"] == [
        "losses agree with run0 exactly (1 row, 1 step)",
        "losses differ from run3, relative: run4 0.1 (1 row, 1 step)",
    ]


def test_virtual_runs_have_neither_times_nor_losses(trained):
    assert trained([math.nan], [math.nan], kind="virtual") == {"steps": [], "losses": [], "drawn": 40}


def test_rows_without_their_series_have_no_curves(tmp_path):
    runs = (made({"steps": steps, "directory": str(tmp_path / "gone")}) for steps in (5, None))
    assert shown(*runs) == {"steps": [], "losses": [], "drawn": 40}


def row(number, ranks, rate, batch=16, parallel="ddp", sweep="a", nodes=1):
    return Point(number, rate, ranks, batch, parallel, nodes, sweep)


def series_of(*ranks, parallel="ddp", **changes):
    """Rows of so many ranks whose throughput grows as these do."""
    return [row(number, size, 10.0 * size, parallel=parallel, **changes) for number, size in enumerate(ranks)]


@pytest.mark.parametrize(("rows", "options", "curves"), [
    # each way of parallelizing and each option has its own, and options of size are part of one
    ([*series_of(1, 2), row(2, 2, 9.0, parallel="tp")], {}, [[0, 1]]),
    (series_of(1, 2, 1, 2), {"seed": list("0011")}, [[0, 1], [2, 3]]),
    (series_of(1, 2), {"cluster.ranks_per_node": ["1", "2"]}, [[0, 1]]),
    (series_of(1, 2), {"parallel.tensor": ["1", "2"]}, [[0, 1]]),
    (series_of(1, 2), {"train.micro_batch": ["1", "2"]}, [[0, 1]]),
    (series_of(1, 2), {"cluster.partition": ["a", "b"]}, []),
    # with the same ranks they are divided by how these are divided, by micro-batches, by nodes and by sweeps
    (series_of(4, 8, 4, 8, parallel="tp"), {"parallel.tensor": list("2244")}, [[0, 1], [2, 3]]),
    (series_of(1, 2, 4, 1, 2, 4),
     {"train.micro_batch": list("444888"), "cluster.ranks_per_node": list("124124")}, [[0, 1, 2], [3, 4, 5]]),
    ([*series_of(1, 2, 4), row(3, 4, 3.0, nodes=2)],
     {"cluster.nodes": list("1112"), "cluster.ranks_per_node": list("1242")}, [[0, 1, 2]]),
    ([row(0, 1, 1.0, sweep="a"), row(1, 2, 2.0, sweep="b")], {}, [[0, 1]]),
    ([row(0, 1, 1.0, sweep="a"), row(1, 2, 2.0, sweep="b"), row(2, 2, 3.0, sweep="a")], {}, [[0, 2]]),
    # of the same the faster counts
    ([row(0, 1, 1.0), row(1, 2, 1.5), row(2, 2, 1.8)], {}, [[0, 2]]),
])  # fmt: skip
def test_rows_stand_on_as_few_curves_as_will_do(rows, options, curves):
    assert sorted(curve.rows for curve in scaling_curves(rows, options)) == curves


@pytest.mark.parametrize(("rows", "options", "curves"), [
    ([row(0, 4, 300.0), row(1, 1, 100.0), row(2, 2, 180.0)], {},
     [("strong", "ddp, batch 16", [1, 2, 0], [1.0, 0.9, 0.75])]),
    (series_of(1, 2), {"data": ["text", "text", "digits"]},  # the third row is of another model
     [("strong", "ddp, batch 16", [0, 1], [1.0, 1.0])]),
    ([row(0, 1, 100.0, batch=8), row(1, 2, 150.0)], {}, [("weak", "ddp, 8 a rank", [0, 1], [1.0, 0.75])]),
    ([*series_of(1, 2), row(2, 1, 50.0, parallel="tp"), row(3, 2, 60.0, parallel="tp")],
     {"activations": ["keep", "keep", "recompute", "recompute"]},
     [("strong", "tp activations=recompute, batch 16", [2, 3], [1.0, 0.6]),  # the fastest curve comes first
      ("strong", "ddp activations=keep, batch 16", [0, 1], [1.0, 1.0])]),
])  # fmt: skip
def test_curves_have_names_ranks_in_order_and_efficiencies(rows, options, curves):
    found = scaling_curves(rows, options)
    assert [(curve.kind, curve.name, curve.rows, curve.efficiency) for curve in found] == curves
