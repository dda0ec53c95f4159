"""Steps and losses as they are drawn, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

from ptdbench.records import series
from ptdbench.records.load import Run
from ptdbench.report.page.curves import of_steps


@pytest.fixture
def trained(tmp_path):
    """Runs with these losses, and step times if they are given, by their numbers."""

    def write(*losses, seconds=None, options=None):
        found = {}
        for number, values in enumerate(losses):
            directory = tmp_path / str(number)
            directory.mkdir()
            rows = series.unknown(len(values), 1)
            rows["loss"] = values
            rows["step_seconds"][:, 0] = 0.1 if seconds is None else seconds
            series.write(directory / series.NAME, [rows])
            found[number] = Run({"schema": 2, "steps": len(values)}, directory)
        return of_steps(found, {number: f"run{number}" for number in found}, options or {})

    return write


def test_short_runs_are_drawn_whole(trained):
    (curve,) = trained([3.0, 2.0, float("nan")], seconds=[0.3, 0.2, 0.1])["steps"]
    assert curve == {"number": 0, "step": [1, 2, 3], "seconds": [0.3, 0.2, 0.1], "loss": [3.0, 2.0, None]}


def test_of_long_runs_the_extremes_and_the_last_step_stay(trained):
    seconds = np.full(10_000, 0.1)
    seconds[[4321, 8765]] = 9.0, 0.01
    (curve,) = trained(np.linspace(5, 1, 10_000), seconds=seconds)["steps"]
    assert len(curve["step"]) <= 400
    drawn = dict(zip(curve["step"], curve["seconds"], strict=True))
    assert (drawn[4322], drawn[8766], curve["step"][0], curve["step"][-1]) == (9.0, 0.01, 1, 10_000)
    assert curve["step"] == sorted(set(curve["step"]))


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([[3.0, 0.0], [3.0, 0.0]], "agree with run0 exactly (1 row, 2 steps)"),
        ([[3.0, 2.0], [3.0, 2.0], [3.0, 2.0 * (1 + 4e-6)]], "agree with run0 within 4.0e-06 (2 rows, 2 steps)"),
        ([[3.0, 2.0, 1.0], [3.0, 2.0]], "agree with run0 exactly (1 row, common steps)"),
        (
            [[3.0, 2.0], [3.0, 2.2], [3.0, 2.4], [3.0, 2.0]],
            "differ from run0, relative: run2 0.2, run1 0.1, others within 1e-05 (3 rows, 2 steps)",
        ),
    ],
)
def test_losses_are_compared_as_far_as_all_came_and_the_farthest_named_first(trained, losses, said):
    assert trained(*losses)["losses"] == [f"losses {said}"]


def test_of_many_rows_the_first_are_drawn_and_all_are_compared(trained):
    found = trained(*[[1.0]] * 45, [1.5])
    assert [curve["number"] for curve in found["steps"]] == list(range(found["drawn"]))
    assert found["drawn"] == 40
    assert found["losses"] == ["losses differ from run0, relative: run45 0.5, others within 1e-05 (45 rows, 1 step)"]


def test_losses_that_are_not_finite_are_named_and_the_others_compared(trained):
    nan, infinite = float("nan"), float("inf")
    found = trained([3.0, infinite], [3.0, 2.0], [3.0, 2.0], [nan, nan])["losses"]
    assert found == [
        "losses agree with run1 exactly (1 row, 2 steps)",
        "losses not finite or not on record: run0 from step 2, run3 from step 1",
    ]


def test_each_training_by_itself_and_a_run_alone_not_at_all(trained):
    options = {"optimizer.lr": ["1", "2", "1", "3", "3"], "parallel": ["ddp", "ddp", "tp", "ddp", "tp"]}
    assert trained([3.0], [9.0], [3.0], [5.0], [5.5], options=options)["losses"] == [
        "losses agree with run0 exactly (1 row, 1 step)",
        "losses differ from run3, relative: run4 0.1 (1 row, 1 step)",
    ]


def test_rows_without_their_series_have_no_curves(tmp_path):
    runs = {0: Run({"schema": 2, "steps": 5}, tmp_path / "gone"), 1: Run({"schema": 2, "steps": None}, tmp_path / "no")}
    assert of_steps(runs, {0: "a", 1: "b"}, {}) == {"steps": [], "losses": [], "drawn": 40}
