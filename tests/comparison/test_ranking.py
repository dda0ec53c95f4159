"""Which runs belong together, and their order, measured and predicted."""

import math
import re
from pathlib import Path

import pytest
from scipy import stats

from ptdbench.comparison import ranking, significance
from ptdbench.comparison.ranking import RESIDUAL, group_runs, of_sweeps, prediction_error, rank, rank_predicted
from ptdbench.comparison.significance import Pool
from ptdbench.records import ledger, store
from ptdbench.report.labels import names
from tests.report.made import failed, made, repeated, run


def test_repeats_are_one_alternative_with_the_figure_of_each_block():
    runs = [
        one for pair in zip(repeated("ddp", [10.0, 20.0]), repeated("fsdp", [5.0, 6.0]), strict=True) for one in pair
    ]
    ddp, fsdp = ranking.group_runs(runs)
    assert ddp.runs == runs[::2]
    assert [*ddp.sample.values()] == [10.0, 20.0]
    assert [*fsdp.sample.values()] == [5.0, 6.0]
    assert ddp.sample.keys() == fsdp.sample.keys()


def depth(parallel, parameters, **changes):
    """A run of a model of this size; of one that failed early, its options alone are known."""
    config = {"model": {"depth": changes.pop("depth", parameters)}, "data": changes.pop("data", {})}
    return run(parallel, parameters=parameters, config=config, **changes)


@pytest.mark.parametrize(("runs", "groups"), [
    ([depth("ddp", 1), depth("ddp", 3), depth("fsdp", 1)], [[0, 2], [1]]),
    ([depth("tp", None, depth=3), depth("ddp", 1), depth("ddp", 3)], [[0, 2], [1]]),  # it failed, and is a row
    ([depth("tp", None, depth=5), depth("ddp", 1), depth("ddp", 3)], [[0], [1], [2]]),
    ([depth("ddp", 1, depth=0.1), depth("ddp", 1, depth=0.2)], [[0, 1]]),  # such as dropout
    ([depth("ddp", 1, global_batch=4), depth("ddp", 1, global_batch=8)], [[0], [1]]),
    ([depth("ddp", 1, tokens_per_sample=4), depth("fsdp", 1, tokens_per_sample=8)], [[0], [1]]),
    ([depth("ddp", 1, data={"image_size": 32}), depth("ddp", 1, data={"image_size": 64})], [[0], [1]]),
    ([depth("ddp", 1, world_size=1), depth("ddp", 1, world_size=2, precision="bf16")], [[0, 1]]),
])  # fmt: skip
def test_throughputs_of_the_same_model_on_the_same_global_batch_are_comparable(runs, groups):
    comparable = ranking.comparable(ranking.Alternative([one], {}) for one in runs)
    assert [[runs.index(one.runs[0]) for one in group] for group in comparable] == groups


def test_each_sweep_has_its_own_alternatives_and_single_runs_of_one_folder_are_no_repeats(tmp_path):
    one, other = of_sweeps([one for sweep in "ab" for one in repeated("ddp", [1.0, 2.0], sweep=sweep)])
    assert (len(one.runs), len(other.runs)) == (2, 2)
    assert not one.sample.keys() & other.sample.keys()
    runs = [run("ddp", rate) for rate in (1.0, 2.0)]
    for number, one in enumerate(runs):
        one.directory = str(tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        store.write_record(tmp_path / str(number), one.written)
    assert [len(one.runs) for one in of_sweeps(runs)] == [1, 1]
    (tmp_path / "multirun.yaml").touch()
    assert [len(one.runs) for one in of_sweeps(runs)] == [2]


def test_runs_of_a_sweep_in_nested_folders_share_their_blocks(tmp_path):
    """``hydra.sweep.subdir='${parallel.name}/${repeat.block}'``."""
    ledger.begin(tmp_path, ["parallel=ddp,fsdp"])
    runs = [
        one | {"directory": str(tmp_path / name / str(block))}
        for name in ("ddp", "fsdp")
        for block, one in enumerate(repeated(name, [1.0, 2.0, 3.0]))
    ]
    for one in runs:
        Path(one.directory).mkdir(parents=True)
        store.write_record(Path(one.directory), one.written)
    ddp, fsdp = of_sweeps(runs)
    assert ddp.sample.keys() == fsdp.sample.keys()
    assert len(ddp.runs) == len(fsdp.runs) == 3


def test_every_run_counts_that_has_no_block_or_shares_one():
    """``parallel=ddp,ddp repeat=2``, and a run of the same sweep from before there were repeats."""
    runs = [*repeated("ddp", [1.0, 2.0]), *repeated("ddp", [3.0, 4.0], name="again"), run("ddp", 5.0)]
    runs[-1].config = {**runs[0].config, "repeat": {"runs": 1}}
    (one,) = ranking.group_runs(runs)
    assert sorted(one.sample.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "changes", [{"world_size": 4}, {"config": {"seed": 1}}, {"nodes": ["a", "b"]}, {"workload": "other"}]
)
def test_other_work_is_another_alternative(changes):
    one = run("ddp", nodes=["a"])
    assert len(ranking.group_runs([one, one])) == 1
    assert len(ranking.group_runs([one, one | changes])) == 2


def test_how_often_it_is_repeated_and_other_nodes_or_unknown_ones_make_no_other_alternative():
    one, other = repeated("ddp", [1.0, 2.0])
    more = other | {"config": {**other.config, "repeat": {"runs": 9, "block": 1}}, "nodes": ["b"]}
    assert len(ranking.group_runs([one | {"nodes": ["a"]}, one | {"nodes": None}, more])) == 1


@pytest.mark.parametrize("side", [[], ["others"]])
def test_one_that_never_knew_its_world_belongs_to_those_that_asked_for_the_same(side):
    """As jobs whose nodes fail before a rank has begun; also where only the other side of a comparison has runs."""
    lost = [run("ddp", status="failed", nodes=None, world_size=None, metrics=None) for _ in range(3)]
    known = run("ddp", nodes=["a", "b"], world_size=8)
    own, others = ([], [known]) if side else ([known], [])
    ((identity, alternative),) = ranking.by_identity([*lost, *own], others=others).items()
    assert len(alternative.runs) == 3 + len(own)
    assert identity in ranking.by_identity([known])
    other = {**known.config, "cluster": {"nodes": 4, "ranks_per_node": 4}}
    assert len(ranking.group_runs([lost[0] | {"config": other}, known])) == 2


@pytest.mark.parametrize(
    ("rates", "typical"), [([30.0, 10.0, 20.0], 20.0), ([40.0, 10.0, 30.0, 20.0], 20.0), ([7.0], 7.0)]
)
def test_the_typical_run_is_the_median_one_of_two_the_slower(rates, typical):
    (one,) = ranking.group_runs(repeated("ddp", rates))
    assert one.median_run.throughput == typical


def test_of_failed_runs_the_first_is_the_typical_one_and_of_others_none():
    broken = [failed("ddp", "first"), failed("ddp", "second")]
    assert ranking.group_runs(broken)[0].median_run is broken[0]
    (one,) = ranking.group_runs([*broken, run("ddp", None), run("ddp", 9.0, status="diverged")])
    assert one.median_run.throughput == 250.0  # samples, where they are not tokens
    assert [*one.sample.values()] == [250.0]


def test_each_side_of_a_comparison_has_its_own_alternatives_with_all_its_blocks():
    """Each block of a side is a sweep in a folder of its own, and is compared with that of the other side."""
    runs = [
        one | {"directory": f"outputs/compare/{side}/{block}/0_ddp"}
        for side, factor in (("before", 1.0), ("after", 0.9))
        for block, one in enumerate(
            repeated("ddp", [factor * rate for rate in (10.0, 20.0, 40.0, 41.0)], options={"series": "compare"})
        )
    ]
    groups = of_sweeps(runs)
    assert [len(one.runs) for one in groups] == [4, 4]
    assert groups[0].sample.keys() == groups[1].sample.keys()
    assert names([one.median_run for one in groups]) == ["ddp [before]", "ddp [after]"]
    assert [place.rank for place in rank(groups)] == [(1, 1), (2, 2)]


#: Three rates that differ by about one per cent, in an order that differs from one block to the next.
STEADY = [1000.0, 1010.0, 990.0]


def scaled(factor, rates=STEADY, jitter=0.001):
    """Rates of another configuration in the same blocks."""
    return [factor * rate * (1 + sign * jitter) for rate, sign in zip(rates, (1, -1, 0, 1, -1), strict=False)]


def ranked(*alternatives):
    return ranking.rank(group_runs(one for runs in alternatives for one in runs))


def answer(standings):
    """The sentence on the places, each called by how it is parallelized."""
    return ranking.answer([(one.alternative.median_run.parallel, one) for one in standings], "tokens")


def test_ranks_differ_or_are_shared():
    standings = ranked(repeated("fsdp", scaled(0.8)), [failed("single", "no")], repeated("ddp", STEADY))
    assert [place.alternative.median_run.parallel for place in standings] == ["ddp", "fsdp", "single"]
    assert [place.rank for place in standings] == [(1, 1), (2, 2), None]
    first, second, last = standings
    assert second.ratio == pytest.approx(stats.gmean(scaled(0.8)) / stats.gmean(STEADY))
    assert second.against_best.low < second.ratio < second.against_best.high
    assert (first.ratio, first.against_best, last.ratio, last.rate, last.margin) == (1.0, None, None, None, None)
    assert re.fullmatch(r"ddp is fastest: 1\.250x fsdp \(95%: 1\.2[34]\d to 1\.2[56]\d\)", answer(standings))
    tied = repeated("pdp", scaled(0.8005, jitter=0.002))
    standings = ranked(repeated("ddp", STEADY), repeated("fsdp", scaled(0.8)), tied)
    assert [place.rank for place in standings] == [(1, 1), (2, 3), (2, 3)]
    largest = max(place.against_best.detectable for place in standings[1:])
    detected = f"with 3 runs each, differences of {1 + largest:.4g}x or more are detected (90% power)"
    assert ranking.remark(standings) == f"ranks: simultaneous 95% confidence; {detected}"
    assert answer(standings).endswith("); pdp and fsdp cannot be told apart")


def test_an_order_is_known_although_ranks_overlap():
    """The noisy one in the middle is tied with either of the outer two."""
    noise = (0.01, -0.01, 0.0, 0.005, -0.005)
    rates = [
        [1000 * math.exp(mean + scale * one) for one in noise]
        for mean, scale in ((0.01, 0.1), (0.005, 1.0), (0.0, 0.0))
    ]
    standings = ranked(*(repeated(name, of) for name, of in zip(("ddp", "pdp", "fsdp"), rates, strict=True)))
    assert [place.rank for place in standings] == [(1, 2), (1, 3), (2, 3)]
    first, middle, last = standings
    assert last.is_behind(first)
    assert not any(one.is_behind(other) for one, other in ((middle, first), (last, middle), (first, last)))
    assert answer(standings).startswith("ddp and pdp cannot be told apart; fsdp is slower: 0.990x ddp (95%: 0.98")


def test_what_would_have_been_seen_is_among_all_pairs():
    first, tied, last = ranked(
        repeated("ddp", STEADY), repeated("fsdp", scaled(0.999, jitter=0.003)), repeated("pdp", scaled(0.5))
    )
    samples = [place.alternative.sample for place in (first, tied, last)]
    alone = significance.compare(apart := Pool(samples).difference(samples[1], samples[0]))
    among = tied.against_best
    assert (tied.rank, among.low, among.high) == ((1, 2), alone.low, alone.high)
    assert among.detectable == significance.compare(apart, significance.LEVEL / 3).detectable > alone.detectable


def test_one_alternative_and_single_runs_of_an_unknown_machine_have_no_order():
    standings = ranked(repeated("ddp", STEADY))
    assert (standings[0].rank, ranking.remark(standings)) == ((1, 1), None)
    assert re.fullmatch(r"ddp: 1,000 tokens/s ±\d\.\d%, compared with no other", answer(standings))
    assert standings[0].margin == significance.margin(Pool([sample := standings[0].alternative.sample]), sample)
    nothing = ranked([failed("ddp", "no")])
    assert ([place.rank for place in nothing], ranking.remark(nothing)) == ([None], None)
    standings = ranked([run("ddp", 1000.0)], [run("fsdp", 100.0)])
    assert [(place.rank, place.margin, place.against_best) for place in standings] == [((1, 2), None, None)] * 2
    assert ranking.remark(standings) == "one run each: not ranked; repeat=5 ranks them"
    assert answer(standings) == "No layout is shown to be faster than another: one run each; repeat=5 ranks them"


def test_two_runs_each_have_the_order_that_they_show_themselves():
    """By Student's t with one degree of freedom: 0.5 % seems to be a difference in one of twenty cases."""
    for share, ends in ((0.9, (1, 2)), (1.1, (1, 1))):
        factor = math.exp(-share * 0.001 * stats.t.ppf(0.975, 1))
        standings = ranked(repeated("ddp", [1000.0] * 2), repeated("fsdp", scaled(factor, [1000.0] * 2)))
        assert standings[0].rank == ends


def test_an_order_behind_a_single_run_is_known():
    standings = ranked([run("single", 5000.0)], repeated("ddp", STEADY), repeated("fsdp", scaled(0.5)))
    assert [place.rank for place in standings] == [(1, 3), (1, 2), (2, 3)]
    each = f"1 to {len(STEADY)} runs each"
    assert ranking.remark(standings) == f"ranks: simultaneous 95% confidence; {each}; single runs: no rank"


def test_where_some_have_too_few_runs_the_others_keep_their_order():
    runs = repeated("ddp", STEADY), repeated("fsdp", scaled(0.8)), repeated("pdp", scaled(0.5)[:1])
    standings = ranked(*runs)
    assert [place.rank for place in standings] == [(1, 2), (2, 3), (1, 3)]
    assert re.search("; with 1 to 3 runs each, .*; single runs: no rank$", ranking.remark(standings))


def test_looking_several_times_makes_the_level_smaller_and_intervals_wider():
    auto = {"runs": "auto", "max": 20}
    once, several = (
        ranked(repeated("ddp", STEADY, options=options), repeated("fsdp", scaled(0.9), options=options))
        for options in ({}, auto)
    )
    first, second = (place.alternative.sample for place in several)
    pool, level = Pool([first, second]), significance.level_of_look(auto["max"])
    assert several[1].against_best == significance.compare(pool.difference(second, first), level)
    assert several[1].margin == significance.margin(pool, second, level) > once[1].margin


def test_what_is_known_to_be_faster_comes_first():
    """The others have no runs of the blocks in which the machine was at its fastest."""
    whole = repeated("ddp", [100.0, 100.1, 99.9, 200.0, 200.1])
    first, second = ranked(whole, repeated("fsdp", [110.0, 110.1, 110.0]))
    order = [(place.alternative.median_run.parallel, place.rank) for place in (first, second)]
    assert order == [("fsdp", (1, 1)), ("ddp", (2, 2))]
    assert second.ratio == pytest.approx(100 / 110, rel=1e-3)
    assert second.against_best.low < second.ratio < second.against_best.high
    whole, half = repeated("ddp", [100.0, 100.1, 99.9, 200.0, 200.1]), repeated("fsdp", [110.0, 110.1, 110.0])
    places = ranked(whole, half, repeated("pdp", [105.0, 105.1]))
    order = [(place.alternative.median_run.parallel, place.rank) for place in places]
    assert order == [("fsdp", (1, 2)), ("ddp", (2, 3)), ("pdp", (1, 3))]
    # Each pair has other blocks in common.
    rates = {"ddp": (200.0, None, 100.0), "fsdp": (100.0, 200.0, None), "pdp": (None, 100.0, 210.0)}
    runs = [one for name, of in rates.items() for one in repeated(name, [*of] * 20)]
    places = ranked(one for one in runs if one.metrics.tokens_per_second)
    assert [place.alternative.median_run.parallel for place in places] == ["pdp", "ddp", "fsdp"]
    assert all(place.is_behind(before) for before, place in zip(places[-1:] + places, places, strict=False))


def test_what_is_hardly_known_at_all_is_said_without_figures():
    wild = [1000.0, 10.0, 100000.0]
    standings = ranked(repeated("ddp", wild), repeated("fsdp", wild[::-1]))
    assert ranking.remark(standings).endswith("; with 3 runs each, not even 2x is detected (90% power)")
    assert answer(standings).endswith(": with 3 runs each, not even 2x is detected (90% power)")


def single_runs(count):
    return [run("ddp", 1000.0 + number, world_size=number + 1) for number in range(count)]


def test_a_thousand_single_runs_are_not_compared_two_by_two(monkeypatch):
    def never(*_):
        raise AssertionError("half a million pairs take seconds, and say nothing")

    monkeypatch.setattr(significance, "combinations", lambda places, size: never() if len(places) > 1 else [])
    standings = ranking.rank(group_runs(single_runs(1000)))
    assert {place.rank for place in standings} == {(1, 1000)}
    runs = [*repeated("ddp", STEADY), *repeated("fsdp", STEADY)]
    with pytest.raises(AssertionError):
        ranking.rank(group_runs(runs))


def test_pairs_of_each_model_are_judged_together():
    groups = group_runs(
        one for model in ("gpt_tiny", "toy") for name, factor in (("ddp", 1.0), ("fsdp", 0.9), ("pdp", 0.8))
        for one in repeated(name, scaled(factor), model=model)
    )  # fmt: skip
    pairs = [(groups[0], groups[1]), (groups[3], groups[4])]
    pools = [Pool([one.sample for one in pair]) for pair in pairs]
    expected = [pool.difference(one.sample, other.sample) for pool, (one, other) in zip(pools, pairs, strict=True)]
    assert ranking.differences(pairs) == expected
    few = group_runs([*repeated("ddp", STEADY[:2]), *repeated("fsdp", STEADY[:2])])
    assert ranking.differences([(few[0], few[1])]) == [None]


ERRORS = {"products": 0.1, "messages": 0.2}


def plan(name, seconds, products=1.0):
    """A plan whose step spends a share of its time on products, and the rest on messages."""
    parts = {"products": seconds * products, "messages": seconds * (1 - products)}
    step = {"step_seconds": seconds, "tokens_per_second": 1000 / (seconds or 1), "parts": parts, "errors": ERRORS}
    fields = {"directory": name, "kind": "planned"}
    return made({**fields, "predicted": step if seconds else {"reason": "none"}})


def test_errors_cancel_as_far_as_steps_are_made_of_the_same():
    alike = prediction_error(plan("a", 1.0, 0.5).predicted, plan("b", 2.0, 0.5).predicted)
    assert alike == pytest.approx(math.sqrt(2) * RESIDUAL)
    apart = prediction_error(plan("a", 1.0, 1.0).predicted, plan("b", 2.0, 0.5).predicted)
    assert apart == pytest.approx(math.sqrt(2 * RESIDUAL**2 + (0.1 * 0.5) ** 2 + (0.2 * 0.5) ** 2))


def test_ranks_overlap_where_intervals_do():
    places = rank_predicted(
        [plan("slow", 1.3), plan("none", 0), plan("first", 1.0), plan("near", 1.02), plan("mixed", 1.1, 0.2)]
    )
    names = [place.alternative.runs[0].directory for place in places]
    assert names == ["first", "near", "mixed", "slow", "none"]
    assert [place.rank for place in places] == [(1, 3), (1, 3), (1, 4), (3, 4), None]
    near = places[1].against_best
    assert near.ratio == pytest.approx(1 / 1.02)
    assert math.log(near.high / near.ratio) == pytest.approx(1.96 * math.sqrt(2) * RESIDUAL, rel=1e-3)
    assert rank_predicted([plan("single", 1.0)])[0].rank is None
