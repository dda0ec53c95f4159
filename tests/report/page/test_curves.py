"""Curves as they are drawn: steps and losses, and scaling."""

import math

import numpy as np
import pytest

from ptdbench.comparison.ranking import Alternative, Standing
from ptdbench.records import series
from ptdbench.report.columns import Row
from ptdbench.report.page.document import Point, scaling_curves, step_curves
from tests.report.made import made


def shown(*runs):
    return step_curves(
        {number: Row(Standing(Alternative([run], {})), f"run{number}") for number, run in enumerate(runs)}
    )


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
            series.append(directory / series.NAME, rows)
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


def test_of_many_rows_the_first_are_drawn(trained):
    found = trained(*[[1.0]] * 46)
    assert [curve["number"] for curve in found["steps"]] == list(range(found["drawn"]))
    assert found["drawn"] == 40


def test_virtual_runs_have_neither_times_nor_losses(trained):
    assert trained([math.nan], [math.nan], kind="virtual") == {"steps": [], "drawn": 40}


def test_rows_without_their_series_have_no_curves(tmp_path):
    runs = (made({"steps": steps, "directory": str(tmp_path / "gone")}) for steps in (5, None))
    assert shown(*runs) == {"steps": [], "drawn": 40}


def row(number, ranks, rate, batch=16, parallel="ddp"):
    return Point(number, rate, ranks, batch, parallel)


def series_of(*ranks, parallel="ddp", **changes):
    """Rows of so many ranks whose throughput grows as these do."""
    return [row(number, size, 10.0 * size, parallel=parallel, **changes) for number, size in enumerate(ranks)]


@pytest.mark.parametrize(
    ("rows", "options", "curves"),
    [
        # each way of parallelizing and each option has its own, and options of size are part of one
        ([*series_of(1, 2), row(2, 2, 9.0, parallel="tp")], {}, [[0, 1]]),
        (series_of(1, 2, 1, 2), {"seed": list("0011")}, [[0, 1], [2, 3]]),
        (series_of(1, 2), {"cluster.ranks_per_node": ["1", "2"]}, [[0, 1]]),
        (series_of(1, 2), {"parallel.tensor": ["1", "2"]}, [[0, 1]]),
        (series_of(1, 2), {"train.micro_batch": ["1", "2"]}, [[0, 1]]),
        (series_of(1, 2), {"cluster.partition": ["a", "b"]}, []),
        # of the same number of ranks the fastest counts, whatever its degrees and its micro-batches
        ([*series_of(4, 8, parallel="tp"), row(2, 8, 90.0, parallel="tp")], {"parallel.tensor": list("224")}, [[0, 2]]),
        ([row(0, 1, 1.0), row(1, 2, 1.5), row(2, 2, 1.8)], {"train.micro_batch": list("448")}, [[0, 2]]),
    ],
)  # fmt: skip
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
