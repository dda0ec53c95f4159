"""The tables of phases and of memory."""

import re

import pytest

from ptdbench.profiling.phases import KINDS, PHASES
from ptdbench.report import explanation
from ptdbench.report.explanation import tables_of_ranks, tables_of_runs
from tests.report.made import DDP, FSDP, PDP, operation, phased

MIB = 2**20


def taking(record, moments=("backward", "backward"), **kinds):
    """The record with the memory of two ranks, in MiB by kind; what is not given is zero."""
    ranks = {kind: [int(one * MIB) for one in kinds.get(kind, (0, 0))] for kind in KINDS}
    return record | {"memory": {"ranks": ranks, "moments": list(moments)}}


SMALL = taking(FSDP, weights=(10, 10), gradients=(10, 10), optimizer=(20, 20), activations=(30, 31))
LARGE = taking(
    DDP, ("forward", "backward"), weights=(20, 20), gradients=(20, 20), optimizer=(40, 40), activations=(32, 30)
)


def test_a_row_a_run_shows_the_rank_that_takes_the_most():
    table, meant = explanation.memory_of_runs({"ddp": LARGE, "fsdp": SMALL}, 120)
    headings, _, *rows = (re.split(r"\s{2,}", line) for line in table.splitlines())
    assert headings == ["run", "peak", "weights", "gradients", "optimizer", "activations", "rank", "peak in"]
    assert rows == [
        ["ddp", "112.0", "20.0", "20.0", "40.0", "32.0", "0", "forward"],
        ["fsdp", "71.0", "10.0", "10.0", "20.0", "31.0", "1", "backward"],
    ]
    assert "MiB" in meant


def test_a_row_a_rank_and_of_many_the_ends():
    table, _ = explanation.memory_of_ranks(SMALL, 120)
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [["rank", "0", "70.0"], ["rank", "1", "71.0"]]
    many = phased("ddp", 10, {"forward": [5] * 20})
    kinds = {kind: [MIB] * 20 for kind in KINDS}
    kinds["activations"] = [(rank + 1) * MIB for rank in range(20)]
    many |= {"memory": {"ranks": kinds, "moments": ["forward"] * 20}}
    table, _ = explanation.memory_of_ranks(many, 120)
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [["rank", "19", "25.00"], ["rank", "0", "6.00"]]


CLOSE = taking(DDP, weights=(20, 20), gradients=(20, 20), optimizer=(40, 40), activations=(32.5, 30))


@pytest.mark.parametrize(("one", "said"), [
    (SMALL, "fsdp -41.0 MiB vs ddp: optimizer -20.0, weights -10.0, gradients -10.0, rest -1.0"),
    (CLOSE, "fsdp 112 MiB vs ddp 112 MiB: within 1%"),
])  # fmt: skip
def test_a_difference_is_the_sum_of_what_is_named(one, said):
    assert list(explanation.compare_memory(one, LARGE, "fsdp", "ddp")) == [f"memory: {said}"]


OF_OTHER_RANKS = {"ranks": {kind: [MIB] * 3 for kind in KINDS}, "moments": ["forward"] * 3}


@pytest.mark.parametrize("damage", [None, {}, {"moments": ["forward"]}, {"moments": ["forward"] * 3}, OF_OTHER_RANKS])
def test_without_memory_of_the_ranks_on_record_nothing_is_said(damage):
    broken = SMALL | {"memory": damage and {**SMALL["memory"], **damage}}
    assert explanation.memory_of_runs({"fsdp": broken}, 100) == explanation.memory_of_ranks(broken, 100) == []
    for pair in ((broken, LARGE), (LARGE, broken)):
        assert list(explanation.compare_memory(*pair, "a", "b")) == []
    assert len(explanation.memory_of_runs({"fsdp": broken, "ddp": LARGE}, 100)[0].splitlines()) == 3


def rows(text: str) -> list[list[str]]:
    """Heading and rows of the first table, split where two spaces or more stand."""
    lines = text.partition("\nms of a step")[0].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines if not line.startswith("──")]


def test_runs_are_beside_each_other_with_the_phases_of_any():
    assert rows(tables_of_runs({"ddp": DDP, "fsdp": FSDP}, 100)) == [
        ["run", "step", "forward", "backward", "exposed", "optimizer", "other"],
        ["ddp", "76.0", "24.0", "39.0", "6.0", "4.0", "3.0"],
        ["fsdp", "120.0", "24.0", "40.0", "37.0", "13.0", "6.0"],
    ]
    text = tables_of_runs({"ddp": DDP, "pdp": PDP}, 150)
    heading, ddp, pdp = rows(text)
    assert heading == ["run", "step", "data", "forward", "backward", "exposed", "bubble", "optimizer", "other"]
    assert (ddp[6], pdp[6]) == ("0.0", "24.0")
    assert "bubble: waiting for other stages" in text
    assert "stragglers" not in text


@pytest.mark.parametrize(
    ("step", "shown"), [(12345, "12,345"), (76, "76.0"), (7.6, "7.60"), (0.76, "0.760"), (1000, "1,000")]
)
def test_figures_have_three_digits_or_more(step, shown):
    assert rows(tables_of_runs({"a": phased("a", step, {"forward": [step], "backward": [0]})}, 100))[1][1] == shown


def test_a_figure_that_is_shown_as_zero_makes_no_column():
    record = phased("ddp", 76, {"forward": [76], "backward": [0], "data": [0.04], "stragglers": [-0.04]})
    text = tables_of_runs({"ddp": record}, 100)
    assert rows(text)[0] == ["run", "step", "forward", "backward"]
    assert "operation" not in text


def test_how_much_slower_the_profiled_steps_were():
    text = "from 5 profiled steps, 1.25 times as long as the timed ones, and rescaled to them"
    assert text in tables_of_runs({"ddp": DDP, "fsdp": FSDP}, 100).splitlines()
    slower = DDP | {"phases": DDP["phases"] | {"steps": 3, "profiled_step_seconds": 0.1}}
    assert "from 3 to 5 profiled steps, 1.25 to 1.32 times" in tables_of_runs({"a": slower, "fsdp": FSDP}, 100)
    unknown = DDP | {"phases": {name: value for name, value in DDP["phases"].items() if "profiled" not in name}}
    assert "profiled" not in tables_of_runs({"ddp": unknown}, 100)


def test_operations_with_what_they_send_and_how_fast():
    barrier = phased("ddp", 50, {"forward": [20], "backward": [20]}, communication={"barrier": operation(1, 0, 0, 1)})
    text = tables_of_runs({"ddp": DDP, "fsdp": FSDP, "other": barrier}, 100)
    table = [re.split(r"\s{2,}", line) for line in text.splitlines() if "all-" in line or "barrier" in line]
    assert table == [
        ["ddp", "all-reduce", "2.00", "4.00", "10.0", "6.00", "0.400"],
        ["fsdp", "all-gather", "2.00", "64.0", "40.0", "37.0", "1.60"],
        ["other", "barrier", "1.00", "0.00", "0.00", "1.00", "-"],
    ]


def test_the_ranks_of_a_run():
    text = tables_of_ranks(PDP, "pdp 1x2 1f1b", 100)
    assert rows(text) == [
        ["rank", "step", "data", "forward", "backward", "bubble", "optimizer", "other"],
        ["mean", "100.0", "1.0", "25.0", "39.0", "24.0", "8.0", "3.0"],
        ["rank 0 (stage 0)", "100.0", "1.0", "22.0", "36.0", "30.0", "8.0", "3.0"],
        ["rank 1 (stage 1)", "100.0", "1.0", "28.0", "42.0", "18.0", "8.0", "3.0"],
    ]
    assert "\npdp 1x2 1f1b: data 1%, forward 25%," in text
    assert "\npdp 1x2 1f1b: bubble 24% of the step, 20% by formula" in text


def test_many_ranks_are_few_rows():
    record = phased("ddp", 90, {"forward": [30.0 + rank for rank in range(40)], "backward": [20] * 40})
    assert [row[0] for row in rows(tables_of_ranks(record, "ddp", 100))] == [
        "rank", "mean", "slowest: rank 39", "fastest: rank 0",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 90, 100])
def test_lines_fit(width):
    every = taking(PDP, **dict.fromkeys(KINDS, (1000.5, 900.25)))
    every.phases.ranks = {phase: [0.0123, 0.0111] for phase in PHASES if phase != "other"}
    text = tables_of_runs({"ddp": LARGE, "pdp 1x2 zbv m8": every, "fsdp": FSDP}, width)
    assert ("left out in 80 columns: rank, peak in" in text) == (width == 80)
    assert width - 20 < max(map(len, text.splitlines())) <= width
    assert "…" not in text
