"""What is shown of the memory of a step."""

import pytest

from ptdbench.measure.parts import KINDS
from ptdbench.report import memory
from tests.report.made import DDP, FSDP, phased

MIB = 2**20


def taking(record, moments=("backward", "backward"), **kinds):
    """The record with the memory of two ranks, in MiB by kind; what is not given is zero."""
    ranks = {kind: [int(one * MIB) for one in kinds.get(kind, (0, 0))] for kind in KINDS}
    return {**record, "memory": {"ranks": ranks, "moments": list(moments), "pass_seconds": 0.5}}


SMALL = taking(FSDP, weights=(10, 10), gradients=(10, 10), optimizer=(20, 20), activations=(30, 31))
LARGE = taking(
    DDP, ("forward", "backward"), weights=(20, 20), gradients=(20, 20), optimizer=(40, 40), activations=(32, 30)
)


def test_a_row_a_run_shows_the_rank_that_takes_the_most():
    table, meant = memory.of_runs({"ddp": LARGE, "fsdp": SMALL}, 120)
    headings, _, *rows = (line.split() for line in table.splitlines())
    assert headings == ["run", "peak", "weights", "gradients", "optimizer", "activations", "rank", "in"]
    assert rows == [
        ["ddp", "112.0", "20.0", "20.0", "40.0", "32.0", "0", "forward"],
        ["fsdp", "71.0", "10.0", "10.0", "20.0", "31.0", "1", "backward"],
    ]
    assert "MiB" in meant


def test_a_row_a_rank():
    table, _ = memory.of_ranks(SMALL, 120)
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [["rank", "0", "70.0"], ["rank", "1", "71.0"]]


def test_of_many_ranks_the_ends_are_shown():
    many = phased("ddp", 10, {"forward": [5] * 20})
    kinds = {kind: [MIB] * 20 for kind in KINDS}
    kinds["activations"] = [(rank + 1) * MIB for rank in range(20)]
    many["memory"] = {"ranks": kinds, "moments": ["forward"] * 20}
    table, _ = memory.of_ranks(many, 120)
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [["rank", "19", "25.00"], ["rank", "0", "6.00"]]


def test_a_difference_is_the_sum_of_what_is_named():
    (said,) = memory.compare(SMALL, LARGE, "fsdp", "ddp")
    assert said == "memory: fsdp -41.0 MiB vs ddp: optimizer -20.0, weights -10.0, gradients -10.0, rest -1.0"


def test_equal_peaks_are_called_equal():
    close = taking(DDP, weights=(20, 20), gradients=(20, 20), optimizer=(40, 40), activations=(32.5, 30))
    assert list(memory.compare(close, LARGE, "fsdp", "ddp")) == ["memory: fsdp 112 MiB vs ddp 112 MiB: within 1%"]


def test_memory_of_other_ranks_than_the_phases_is_not_shown():
    kinds = {kind: [MIB] * 3 for kind in KINDS}
    other = {**SMALL, "memory": {"ranks": kinds, "moments": ["forward"] * 3}}
    assert memory.of_ranks(other, 100) == []


@pytest.mark.parametrize("damage", [None, {}, {"moments": ["forward"]}, {"moments": ["forward"] * 3}])
def test_without_memory_on_record_nothing_is_said(damage):
    broken = {**SMALL, "memory": damage and {**SMALL["memory"], **damage}}
    assert memory.of_runs({"fsdp": broken}, 100) == memory.of_ranks(broken, 100) == []
    assert list(memory.compare(broken, LARGE, "fsdp", "ddp")) == list(memory.compare(LARGE, broken, "a", "b")) == []
    assert len(memory.of_runs({"fsdp": broken, "ddp": LARGE}, 100)[0].splitlines()) == 3
