"""Statistics of repeated runs: against SciPy's tests, by hand, and how often they are wrong on made runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ptdbench.measure import comparison
from ptdbench.measure.comparison import LEVEL, Sample, Spread

RANDOM = np.random.default_rng


def sample(random: np.random.Generator, runs: int, deviation: float = 0.03, mean: float = 0.0, own: str = "") -> Sample:
    """Made runs of a configuration, by blocks; with ``own`` they are of no block that others have."""
    rates = np.exp(random.normal(mean, deviation, runs)).tolist()
    return {f"{own}{block}" if own else block: rate for block, rate in enumerate(rates)}


def logs(one: Sample) -> list[float]:
    return [math.log(value) for value in one.values()]


@pytest.mark.parametrize("runs", [3, 5, 20])
def test_runs_of_a_block_are_compared_with_each_other(runs):
    random = RANDOM(runs)
    one, other = sample(random, runs, mean=0.05), sample(random, runs)
    found = comparison.compare(one, other)
    theirs = stats.ttest_rel(logs(one), logs(other))
    interval = theirs.confidence_interval(0.95)
    assert found.is_paired
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert found.ratio == pytest.approx(stats.gmean([*one.values()]) / stats.gmean([*other.values()]))


def test_a_drift_of_the_machine_cancels_within_blocks():
    drift = np.linspace(0, 0.5, 6)
    one, other = ({block: math.exp(-slow + more) for block, slow in enumerate(drift)} for more in (0.01, 0.0))
    other[3] *= 1.0001
    assert comparison.compare(one, other).p < 1e-6
    assert comparison.compare({f"a{block}": rate for block, rate in one.items()}, other).p > 0.5


@pytest.mark.parametrize(("runs", "others"), [(3, 4), (5, 5), (12, 3)])
def test_runs_without_common_blocks_are_compared_by_their_means(runs, others):
    random = RANDOM(runs)
    one, other = sample(random, runs, 0.01, 0.02), sample(random, others, 0.05, own="other")
    found = comparison.compare(one, other)
    theirs = stats.ttest_ind(logs(one), logs(other), equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert not found.is_paired
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))


def test_blocks_that_one_of_them_lacks_do_not_count():
    random = RANDOM(0)
    one, other = dict(sample(random, 6)), dict(sample(random, 6))
    known = comparison.compare({block: one[block] for block in range(1, 5)}, other)
    one[0] = 100.0
    del one[5], other[0]
    assert comparison.compare(one, other) == known


def test_too_few_runs_say_nothing():
    random = RANDOM(0)
    assert comparison.compare(sample(random, 2), sample(random, 2)) is None
    assert comparison.compare(sample(random, 1), sample(random, 50, own="other")) is None
    assert comparison.compare({}, sample(random, 5)) is None
    assert comparison.ranks([sample(random, 2, mean=mean) for mean in (9.0, 0.0)]) == [(1, 2), (1, 2)]


def test_what_is_known_of_the_machine_judges_single_runs():
    spread = Spread(deviation=0.02, freedom=10)
    within = comparison.within(spread, runs=1)
    assert within == pytest.approx(math.exp(0.02 * math.sqrt(2) * stats.t.ppf(0.975, 10)) - 1)
    for more, ranks in ((0.001, [(1, 1), (2, 2)]), (-0.001, [(1, 2), (1, 2)])):
        assert comparison.ranks([{"a": 1 + within + more}, {"b": 1.0}], spread=spread) == ranks


def test_what_is_seen_among_several_pairs_has_to_be_larger():
    random = RANDOM(6)
    one, other = sample(random, 5), sample(random, 5)
    alone, among = comparison.compare(one, other), comparison.compare(one, other, pairs=10)
    assert among.detectable == comparison.compare(one, other, LEVEL / 10).detectable > alone.detectable
    assert (among.low, among.high, among.p) == (alone.low, alone.high, alone.p)


def test_what_no_float_can_hold_is_no_error():
    spread = Spread(1e300, 4)
    assert comparison.within(spread, runs=1) > 1e300
    found = comparison.compare({"a": 1.0}, {"b": 1.0}, spread=spread)
    assert found.low == 0
    assert min(found.high, found.detectable) > 1e300


def test_equal_runs_do_not_differ_and_equal_differences_do():
    same = {0: 2.0, 1: 3.0, 2: 5.0}
    double = {block: 2 * rate for block, rate in same.items()}
    assert comparison.compare(same, same).p == 1
    found = comparison.compare(double, same)
    assert found.p < 1e-12
    assert found.low == found.high == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("was", "before", "now", "after"), [(1, 20, 17, 20), (1, 20, 4, 20), (3, 5, 3, 4), (2, 3, 0, 9)]
)
def test_more_failures_than_chance_makes_are_fishers(was, before, now, after):
    expected = stats.fisher_exact([[now, after - now], [was, before - was]], alternative="greater").pvalue
    assert comparison.chance_of_failures(was, before, now, after) == pytest.approx(expected)


def test_holm():
    """The example of R's ``p.adjust`` for these values, by hand: 4 * 0.005, 3 * 0.01, 2 * 0.03, then never less."""
    assert comparison.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert comparison.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert len(comparison.holm([])) == 0


def test_ranks_are_ranges():
    """Three of which the middle one is noisy: it is tied with either of the outer two, which differ from each other."""
    noise = (0.01, -0.01, 0.0, 0.005, -0.005)
    samples = [
        {block: math.exp(mean + scale * one) for block, one in enumerate(noise)}
        for mean, scale in ((0.01, 0.1), (0.005, 1.0), (0.0, 0.0))
    ]
    assert comparison.ranks(samples) == [(1, 2), (1, 3), (2, 3)]
    assert comparison.ranks([{0: 3.0, 1: 3.1, 2: 2.9}, {0: 1.0, 1: 1.1, 2: 0.9}]) == [(1, 1), (2, 2)]
    assert comparison.ranks([{0: 1.0, 1: 1.1, 2: 0.9}, {0: 3.0, 1: 3.1, 2: 2.9}]) == [(2, 2), (1, 1)]


def test_of_identical_configurations_one_in_twenty_is_told_apart_at_most():
    random, sweeps = RANDOM(1), 600
    wrong = sum(
        any(ranks != (1, 4) for ranks in comparison.ranks([sample(random, 5) for _ in range(4)])) for _ in range(sweeps)
    )
    assert wrong <= stats.binom.ppf(0.999, sweeps, LEVEL)
    assert wrong > 0


def test_looking_several_times_finds_no_more():
    random, sweeps, most = RANDOM(2), 400, 20
    level, wrong = comparison.level_of_look(most), 0
    for _ in range(sweeps):
        one, other = sample(random, most), sample(random, most)
        seen = [
            comparison.differing([({b: one[b] for b in range(n)}, {b: other[b] for b in range(n)})], level)
            for n in comparison.looks(most)
        ]
        wrong += any(sign for (sign,) in seen)
    assert 0 < wrong <= stats.binom.ppf(0.999, sweeps, LEVEL)


@pytest.mark.parametrize("most", [3, 4, 5, 20, 100])
def test_looks_end_with_the_last_block_and_begin_when_enough_is_there(most):
    looks = comparison.looks(most)
    assert looks == sorted(set(looks))
    assert looks[-1] == most
    assert looks[0] >= comparison.LEAST
    assert comparison.level_of_look(most) == LEVEL / len(looks)


@pytest.mark.parametrize("runs", [3, 5, 12])
def test_what_is_said_to_be_detectable_is_seen_in_nine_of_ten_cases(runs):
    deviation, tries = 0.03, 1500
    # of two samples with these deviations the differences have this standard error
    error = deviation * math.sqrt(2 / runs)
    share = comparison._detectable(error, runs - 1, LEVEL)
    random = RANDOM(runs)
    pairs = (
        (sample(random, runs, deviation, math.log1p(share)), sample(random, runs, deviation)) for _ in range(tries)
    )
    seen = sum(comparison.compare(one, other).p <= LEVEL for one, other in pairs)
    low, high = stats.binom.ppf([0.0005, 0.9995], tries, comparison.POWER)
    assert low <= seen <= high


@pytest.mark.parametrize("own", ["", "other"])
def test_the_runs_that_are_needed_make_it_detectable(own):
    random = RANDOM(3)
    one, other = sample(random, 6), sample(random, 6, own=own)
    found, needed = comparison.compare(one, other), comparison.runs_needed(one, other, 0.01)
    assert found.detectable > 0.01
    assert needed > 6
    assert comparison.runs_needed(one, other, 10.0) == comparison.LEAST
    assert comparison.runs_needed(one, other, 1e-6) is None
    assert comparison.runs_needed({}, other, 0.01) is None
    # with so many runs that vary as these do
    freedom = 10 if own else 5
    error = math.log(found.high / found.ratio) / stats.t.ppf(0.975, freedom) * math.sqrt(6 / needed)
    error *= math.sqrt(freedom / stats.chi2.ppf(0.2, freedom))  # the upper limit of what is estimated
    assert comparison._detectable(error, (needed - 1) * (2 if own else 1), LEVEL) == pytest.approx(0.01, rel=0.05)


def test_the_spread_is_that_within_configurations():
    far = [{0: 1.0, 1: math.exp(0.2)}, {0: 50.0, 1: 50.0 * math.exp(0.4)}, {0: 7.0}]
    spread = comparison.spread_of(far)
    assert spread == Spread(pytest.approx(math.sqrt((0.1**2 * 2 + 0.2**2 * 2) / 2)), 2)
    assert comparison.spread_of([{0: 7.0}]) is None


def test_the_margin_is_that_of_a_mean():
    values = logs(one := sample(RANDOM(4), 5))
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert comparison.margin(one) == pytest.approx(math.exp((high - low) / 2) - 1)
    assert comparison.margin({0: 1.0, 1: 2.0}) is None
