"""What a report of several sweeps compares, and what is typed for each run."""

from __future__ import annotations

from pathlib import Path

from ptdbench.records.load import Run
from ptdbench.report.labels import names
from ptdbench.report.ranking import rank
from ptdbench.report.sweeps import alternatives_of, command
from tests.report.made import repeated, run


def test_each_sweep_has_its_own_alternatives():
    runs = [Run(one, Path(one["directory"])) for name in "ab" for one in repeated("ddp", [1.0, 2.0], sweep=name)]
    assert [len(one.runs) for one in alternatives_of(runs)] == [2, 2]


def test_each_side_of_a_comparison_has_its_own_alternatives_with_all_its_blocks():
    """And their runs are compared block by block, as ``compare`` does."""
    runs = []
    for side, factor in (("before", 1.0), ("after", 0.9)):
        for block, one in enumerate(repeated("ddp", [factor * rate for rate in (10.0, 20.0, 40.0, 41.0)])):
            directory = Path("outputs/compare", side, str(block), "0_ddp")
            repeat = {"block": block, "series": "compare"}
            config = {**one["config"], "repeat": repeat}
            runs.append(Run({**one, "config": config, "directory": str(directory)}, directory))
    found = alternatives_of(runs)
    assert [len(one.runs) for one in found] == [4, 4]
    assert names([one.typical for one in found]) == ["ddp [before]", "ddp [after]"]
    assert [place.rank for place in rank(found).places] == [(1, 1), (2, 2)]


def test_what_is_typed_has_no_repeats_and_is_quoted():
    of_start = ["repeat.block=3", "+repeat.runs=5", "resume=a", "sweep.resume=b"]
    typed = command(run(overrides=["model=a b", *of_start, "+x='1'"]))
    assert typed.endswith(" 'model=a b' '+x='\"'\"'1'\"'\"''")
    assert command(run(overrides=[])) == command(run(overrides=["repeat.runs=5"]))


def test_under_a_launcher_it_begins_with_that():
    assert command(run(overrides=["a=1"], launcher="torchrun")).startswith("torchrun ... ")


def test_what_was_typed_may_be_unknown():
    assert command(run(overrides=None)) is None
    assert command(run()) is None
