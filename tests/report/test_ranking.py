"""The order of alternatives, and what is said of how sure it is."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from ptdbench.measure import comparison
from ptdbench.measure.comparison import Spread
from ptdbench.records.alternatives import group
from ptdbench.report import ranking
from tests.report.made import failed, repeated, run

#: Three rates that differ by about one per cent, in an order that differs from one block to the next.
STEADY = [1000.0, 1010.0, 990.0]


def scaled(factor, rates=STEADY, jitter=0.001):
    """Rates of another configuration in the same blocks."""
    return [factor * rate * (1 + sign * jitter) for rate, sign in zip(rates, (1, -1, 0, 1, -1), strict=False)]


def ranked(*alternatives, spread=None):
    return ranking.rank(group(one for runs in alternatives for one in runs), spread)


def test_each_has_its_rank_where_all_differ():
    found = ranked(repeated("fsdp", scaled(0.8)), [failed("single", "no")], repeated("ddp", STEADY))
    assert [place.alternative.typical["parallel"] for place in found.places] == ["ddp", "fsdp", "single"]
    assert [place.rank for place in found.places] == [(1, 1), (2, 2), None]
    first, second, last = found.places
    assert second.ratio == pytest.approx(stats.gmean(scaled(0.8)) / stats.gmean(STEADY))
    assert second.against_best.low < second.ratio < second.against_best.high
    assert (first.ratio, first.against_best, last.ratio, last.rate, last.margin) == (1.0, None, None, None, None)


def test_what_is_tied_shares_its_ranks():
    found = ranked(
        repeated("ddp", STEADY), repeated("fsdp", scaled(0.8)), repeated("pdp", scaled(0.8005, jitter=0.002))
    )
    assert [place.rank for place in found.places] == [(1, 1), (2, 3), (2, 3)]
    said = ranking.remark(found)
    assert said == "3 runs each: rank ranges have simultaneous 95% confidence, intervals pointwise 95%"


def test_of_what_is_tied_with_the_first_it_is_said_what_would_have_been_seen():
    pairs = repeated("ddp", STEADY), repeated("fsdp", scaled(0.999, jitter=0.003))
    found = ranked(*pairs)
    _, tied = found.places
    assert tied.rank == (1, 2)
    detectable = f"{tied.against_best.detectable:.1%} detectable (90% power) vs the first"
    certain = "rank ranges have simultaneous 95% confidence, intervals pointwise 95%"
    assert ranking.remark(found) == f"3 runs each: {certain}; {detectable}"
    among_three = ranked(*pairs, repeated("pdp", scaled(0.5)))
    assert among_three.places[1].against_best.detectable > tied.against_best.detectable
    assert among_three.places[1].against_best.high == tied.against_best.high


def test_a_single_alternative_has_no_order():
    found = ranked(repeated("ddp", STEADY))
    assert (found.places[0].rank, ranking.remark(found)) == ((1, 1), None)
    assert found.places[0].margin == comparison.margin(found.places[0].alternative.sample)
    nothing = ranked([failed("ddp", "no")])
    assert ([place.rank for place in nothing.places], ranking.remark(nothing)) == ([None], None)


@pytest.mark.parametrize(("runs", "each"), [(1, "one run each"), (2, "2 runs each")])
def test_few_runs_without_knowledge_of_the_machine_have_no_order(runs, each):
    found = ranked(repeated("ddp", STEADY[:runs]), repeated("fsdp", scaled(0.1, STEADY[:runs])))
    assert [(place.rank, place.margin, place.against_best) for place in found.places] == [((1, 2), None, None)] * 2
    assert ranking.remark(found) == f"{each}, run-to-run variation unknown: no order is shown; repeat=5 measures it"


@pytest.mark.parametrize("runs", [1, 2])
def test_few_runs_are_ranked_by_what_is_known_of_the_machine(runs):
    spread = Spread(0.01, 8)
    within = math.exp(0.01 * math.sqrt(2 / runs) * stats.t.ppf(0.975, 8)) - 1
    rates = {"a": 1000.0, "b": 1000 / (1 + 0.9 * within), "c": 1000 / (1 + 3 * within)}
    found = ranked(*(repeated(name, [rate] * runs) for name, rate in rates.items()), spread=spread)
    assert [place.rank for place in found.places] == [(1, 2), (1, 2), (3, 3)]
    said = ranking.remark(found)
    assert f" each, run-to-run variation 1.0%: no order within {within:.1%}, order above " in said


def test_enough_runs_need_no_knowledge_of_the_machine():
    found = ranked(repeated("ddp", STEADY), repeated("fsdp", scaled(0.8)), spread=Spread(0.5, 8))
    assert found.spread is None
    assert [place.rank for place in found.places] == [(1, 1), (2, 2)]


def test_where_some_have_too_few_runs_the_others_keep_their_order():
    runs = repeated("ddp", STEADY), repeated("fsdp", scaled(0.8)), repeated("pdp", scaled(0.5)[:1])
    found = ranked(*runs)
    assert [place.rank for place in found.places] == [(1, 2), (2, 3), (1, 3)]
    said = (
        "1 to 3 runs each: rank ranges have simultaneous 95% confidence, intervals pointwise 95%; fewer than 3 runs: "
    )
    assert ranking.remark(found) == f"{said}no order"
    known = ranked(*runs, spread=Spread(0.01, 8))
    assert [place.rank for place in known.places] == [(1, 1), (2, 2), (3, 3)]
    assert ranking.remark(known) == f"{said}judged by run-to-run variation 1.0%"


def test_looking_several_times_makes_the_level_smaller():
    auto = {"runs": "auto", "max": 20}
    once, several = (
        ranked(repeated("ddp", STEADY, options=options), repeated("fsdp", scaled(0.9), options=options))
        for options in ({}, auto)
    )
    assert once.level == comparison.LEVEL
    assert several.level == comparison.level_of_look(20) < comparison.LEVEL
    assert several.places[1].against_best.high == once.places[1].against_best.high
    assert several.places[1].against_best.detectable > once.places[1].against_best.detectable


def test_what_is_known_to_be_faster_comes_first_though_its_mean_is_lower():
    """The others have no runs of the blocks in which the machine was at its fastest."""
    whole = repeated("ddp", [100.0, 100.1, 99.9, 200.0, 200.1])
    first, second = ranked(whole, repeated("fsdp", [110.0, 110.1, 110.0])).places
    assert [(place.alternative.typical["parallel"], place.rank) for place in (first, second)] == [
        ("fsdp", (1, 1)),
        ("ddp", (2, 2)),
    ]
    assert second.ratio == pytest.approx(100 / 110, rel=1e-3)
    assert second.against_best.low < second.ratio < second.against_best.high


def test_what_is_hardly_known_at_all_is_said_without_figures():
    wild = [1000.0, 10.0, 100000.0]
    found = ranked(repeated("ddp", wild), repeated("fsdp", wild[::-1]))
    assert ranking.remark(found).endswith("; 2x and more detectable (90% power) vs the first")
    single = ranked(repeated("ddp", [2.0]), repeated("fsdp", [1.0]), spread=Spread(3.0, 4))
    assert "run-to-run variation 2x and more: no order within 2x and more" in ranking.remark(single)
    assert ranking.remark(ranked(*([one] for one in single_runs(2)), spread=Spread(1e300, 4)))


def single_runs(count):
    return [run("ddp", 1000.0 + number, world_size=number + 1) for number in range(count)]


def test_a_thousand_single_runs_are_not_compared_two_by_two(monkeypatch):
    def never(*_):
        raise AssertionError("half a million pairs take seconds, and say nothing")

    monkeypatch.setattr(comparison, "combinations", lambda places, size: never() if len(places) > 1 else [])
    found = ranking.rank(group(single_runs(1000)))
    assert {place.rank for place in found.places} == {(1, 1000)}
    with pytest.raises(AssertionError):
        ranking.rank(group(single_runs(3)), Spread(0.01, 8))
