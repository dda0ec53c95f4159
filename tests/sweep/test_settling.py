"""When ``repeat=auto`` stops: records made by hand, whose differences are what a test wants."""

from __future__ import annotations

import math

import pytest

from ptdbench.measure import comparison
from ptdbench.records import record, store
from ptdbench.setup.config import Repeat
from ptdbench.sweep.settling import Settling
from tests.sweep.made import CONFIG, DONE

#: Looks after three blocks, after five and after eight.
MOST = 8


@pytest.fixture
def sweep(tmp_path):
    """Adds the runs of an alternative to a sweep: its throughputs, block by block; ``None`` is a run that failed."""

    def add(parallel, throughputs):
        for block, rate in enumerate(throughputs):
            store.append_result(tmp_path, a_run(tmp_path / f"{block}_{parallel}", parallel, block, rate))
        return tmp_path

    return add


def a_run(directory, parallel, block, rate):
    config = {**CONFIG, "parallel": {"name": parallel}, "repeat": {"block": block}}
    written = record.begin(config, directory, {}) | {"world_size": 2, "nodes": ["n1"]}
    if rate is None:
        return written | {"error": None}
    return written | DONE | {"world_size": 2, "nodes": ["n1"], "metrics": {"tokens_per_second": rate}}


def settling(tied_within=0.02):
    return Settling(Repeat(runs="auto", max=MOST, tied_within=tied_within, seed=0, block=None, series=None))


def alike(share):
    """Throughputs of eight blocks that go up and down by a share."""
    return [1000 * math.exp(share * sign) for sign in (1, -1, 1, -1, 1, -1, 1, -1)]


def test_the_looks_of_these_tests():
    assert comparison.looks(MOST) == [3, 5, 8]


def test_it_stops_at_a_look_when_all_pairs_are_known_to_differ(sweep, capsys):
    sweep("ddp", alike(0.001))
    sweep("fsdp", [1.1 * rate for rate in alike(0.002)])
    found = sweep("pdp", [1.3 * rate for rate in alike(0.003)])
    over = settling()
    assert [over(found, blocks) for blocks in (0, 1, 2)] == [False] * 3
    assert capsys.readouterr().err == ""
    assert over(found, 3)
    assert capsys.readouterr().err == "3 blocks of at most 8: settled\n"
    assert [over(found, blocks) for blocks in (4, 5)] == [True] * 2  # and stays so, without another look
    assert capsys.readouterr().err == ""


def test_it_goes_on_while_a_pair_is_open_and_says_which(sweep, capsys):
    sweep("ddp", alike(0.05))
    sweep("fsdp", [1.01 * rate for rate in alike(0.05)[::-1]])
    found = sweep("pdp", [9.0 * rate for rate in alike(0.05)])
    over = settling()
    assert [over(found, blocks) for blocks in (3, 4, 5)] == [False] * 3
    assert capsys.readouterr().err.splitlines() == [
        "3 blocks of at most 8: not settled between ddp and fsdp",
        "5 blocks of at most 8: not settled between ddp and fsdp",
    ]


def test_of_many_open_pairs_it_names_three(sweep, capsys):
    lots = {"ddp": (8, 10, 12), "fsdp": (10, 12, 8), "hsdp": (12, 8, 10), "pdp": (8, 12, 10)}
    for name, rates in lots.items():
        found = sweep(name, [100.0 * rate for rate in rates])
    assert not settling()(found, 3)
    assert capsys.readouterr().err == (
        "3 blocks of at most 8: not settled between ddp and fsdp; ddp and hsdp; ddp and pdp, and 3 other pairs\n"
    )


def test_tied_is_what_differs_by_at_most_the_share_that_was_asked_for(sweep):
    """And is known to: runs that differ by much more from each other say nothing."""
    sweep("ddp", [1000.0, 1002.0, 1000.0, 1002.0, 1000.0, 1002.0, 1000.0, 1002.0])
    found = sweep("fsdp", [1001.0, 1000.0, 1002.0, 1001.0, 1001.0, 1001.0, 1001.0, 1001.0])
    assert settling(tied_within=0.02)(found, 3)
    assert not settling(tied_within=0.0)(found, 3)
    assert not settling(tied_within=0.001)(found, 3)


@pytest.mark.parametrize("sign", [1, -1])
def test_tied_is_in_both_directions(sweep, sign):
    """One is perhaps a fifth slower, and at most one per cent faster."""
    sweep("ddp", [1000.0] * 3)
    found = sweep("fsdp", [1000.0 * math.exp(sign * share) for share in (0.125, 0.1, 0.075)])
    assert not settling(tied_within=0.02)(found, 3)
    assert settling(tied_within=0.25)(found, 3)


def test_with_what_has_failed_there_is_nothing_to_settle(sweep):
    sweep("ddp", alike(0.001))
    sweep("fsdp", [1.1 * rate for rate in alike(0.002)])
    found = sweep("pdp", [None] * MOST)
    assert settling()(found, 3)


def test_an_alternative_that_failed_now_and_then_needs_more_runs(sweep):
    sweep("ddp", alike(0.001)[:3])
    found = sweep("fsdp", [1100.0, None, None])
    assert not settling()(found, 3)


@pytest.mark.parametrize("rates", [alike(0.3), [None] * MOST], ids=["ok", "failed"])
def test_a_single_alternative_ends_at_the_first_look(sweep, rates, capsys):
    found = sweep("ddp", rates)
    over = settling()
    assert [over(found, blocks) for blocks in (1, 2, 3)] == [False, False, True]
    assert capsys.readouterr().err == "3 blocks of at most 8: nothing to compare\n"
