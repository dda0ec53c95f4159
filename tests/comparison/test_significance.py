"""What differences show: by hand, against SciPy, and how often they are wrong on made runs."""

import math

import numpy as np
import pytest
from scipy import stats

from ptdbench.comparison import significance
from ptdbench.comparison.significance import LEVEL, MIN_RUNS, Difference, Pool, Sample, p_values
from tests.comparison.test_variation import LAYOUTS, RANDOM, between, logs, sample


def ranks(samples: list[Sample]) -> list[tuple[int, int]]:
    return significance.ranks(significance.faster(Pool(samples), samples))


def test_the_interval_and_the_chance_are_students_also_of_numbers_that_no_float_can_hold():
    one, other = sample(RANDOM(0), 5, mean=0.05), sample(RANDOM(1), 5)
    comparison, theirs = significance.compare(between(one, other)), stats.ttest_rel(logs(one), logs(other))
    interval = theirs.confidence_interval(0.95)
    assert p_values([between(one, other)]) == pytest.approx([theirs.pvalue])
    assert (comparison.low, comparison.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert comparison.ratio == pytest.approx(stats.gmean([*one.values()]) / stats.gmean([*other.values()]))
    comparison = significance.compare(Difference(mean=0.0, error=1e300, freedom=4, runs=1, is_paired=False))
    assert comparison.low == 0
    assert min(comparison.high, comparison.detectable) > 1e300


def test_equal_runs_do_not_differ_and_equal_differences_do():
    same = {0: 2.0, 1: 3.0, 2: 5.0}
    apart = between({block: 2 * rate for block, rate in same.items()}, same)
    first, second = p_values([between(same, same), apart])
    assert (first, second < 1e-12) == (1, True)
    comparison = significance.compare(apart)
    assert comparison.low == comparison.high == pytest.approx(2.0)


def test_holm_and_ranges_of_ranks():
    """The example of R's ``p.adjust`` for these values, by hand: 4 * 0.005, 3 * 0.01, 2 * 0.03, then never less."""
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert len(significance.holm([])) == 0
    assert ranks(LAYOUTS) == [(1, 1), (2, 3), (2, 3)]
    assert ranks(LAYOUTS[:2]) == [(1, 2), (1, 2)]  # the third says how much runs differ
    assert ranks([{0: 1.0, 1: 1.1, 2: 0.9}, {0: 3.0, 1: 3.1, 2: 2.9}]) == [(2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("count", "runs", "ratio"), [(4, 5, 1), (8, 3, 10), (2, 2, 1)], ids=["alike", "one of them noisy", "few runs"]
)
def test_of_identical_configurations_one_in_twenty_sweeps_tells_any_apart_at_most(count, runs, ratio):
    """Also where the first one's deviation is ten times that of the others."""
    random, sweeps = RANDOM(1), 600
    wrong = 0
    for _ in range(sweeps):
        samples = [sample(random, runs, 0.03 * (1 if place else ratio)) for place in range(count)]
        wrong += any(significance.faster(Pool(samples), samples))
    assert wrong <= stats.binom.ppf(0.999, sweeps, LEVEL)
    assert wrong > 0


@pytest.mark.parametrize("most", [3, 4, 5, 20, 100])
def test_looks_end_with_the_last_block_and_begin_when_enough_is_there(most):
    looks = significance.interim_looks(most)
    assert looks == sorted(set(looks))
    assert looks[-1] == most
    assert looks[0] >= MIN_RUNS
    assert significance.level_of_look(most) == LEVEL / len(looks)


@pytest.mark.parametrize("runs", [3, 5, 12])
def test_what_is_said_to_be_detectable_is_seen_with_a_chance_of_ninety_percent(runs):
    """By the noncentral t distribution, for an error that the true one exceeds with a chance of 20 %."""
    freedom, error = runs - 1, 0.03
    comparison = significance.compare(Difference(0.0, error, freedom, runs, is_paired=True), pairs=3)
    largest = error * math.sqrt(freedom / stats.chi2.ppf(0.2, freedom))
    critical = stats.t.ppf(1 - LEVEL / 3 / 2, freedom)
    seen = stats.nct.sf(critical, freedom, math.log1p(comparison.detectable) / largest)
    assert seen == pytest.approx(significance.POWER)


def test_what_is_detectable_with_hardly_any_freedom_among_thousands_of_pairs_takes_no_time():
    """SciPy's quantile of the noncentral t distribution would not return."""
    freedom, error, pairs = 8 / 9, 1e-7, 4950
    comparison = significance.compare(Difference(0.0, error, freedom, 2, is_paired=True), pairs=pairs)
    largest = error * math.sqrt(freedom / stats.chi2.ppf(0.2, freedom))
    critical = stats.t.ppf(1 - LEVEL / pairs / 2, freedom)
    small_enough = math.log1p(comparison.detectable) / largest / critical  # seen deviation over true deviation
    assert stats.chi2.cdf(freedom * small_enough**2, freedom) == pytest.approx(significance.POWER)


def test_the_margin_is_that_of_a_mean():
    values = logs(one := sample(RANDOM(4), 5))
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert significance.margin(Pool([one]), one) == pytest.approx(math.exp((high - low) / 2) - 1)
    assert significance.margin(Pool([one]), {0: 1.0, 1: 2.0}) is None
