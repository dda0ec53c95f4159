"""Variation between runs, and the significance of differences."""

import math

import numpy as np
import pytest
from scipy import stats

from ptdbench.comparison import significance
from ptdbench.comparison.significance import (
    LEVEL,
    MIN_RUNS,
    PRIOR_FREEDOM,
    Difference,
    Pool,
    Sample,
    Spread,
    p_values,
)

RANDOM = np.random.default_rng

#: The runs of an issue: three layouts of which the first is clearly the fastest in every block.
LAYOUTS = [dict(enumerate(rates)) for rates in ((164.0, 168.0, 148.0), (120.0, 105.0, 124.0), (103.0, 110.0, 112.0))]


def sample(random: np.random.Generator, runs: int, deviation: float = 0.03, mean: float = 0.0, own: str = "") -> Sample:
    """Made runs of a configuration, by blocks; with ``own`` they are of no block that others have."""
    rates = np.exp(random.normal(mean, deviation, runs)).tolist()
    return {f"{own}{block}" if own else block: rate for block, rate in enumerate(rates)}


def logs(one: Sample) -> list[float]:
    return [math.log(value) for value in one.values()]


def between(one: Sample, other: Sample, *more: Sample):
    return Pool([one, other, *more]).difference(one, other)


def squares_about_means(table: np.ndarray) -> float:
    """The residual sum of squares of a two-way layout, by its textbook formula."""
    return float(((table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()) ** 2).sum())


@pytest.mark.parametrize("runs", [3, 5, 20])
def test_two_of_the_same_blocks_are_compared_by_the_paired_t_test(runs):
    random = RANDOM(runs)
    one, other = sample(random, runs, mean=0.05), sample(random, runs)
    difference = between(one, other)
    theirs = stats.ttest_rel(logs(one), logs(other))
    assert (difference.runs, difference.is_paired) == (runs, True)
    assert difference.mean == pytest.approx(np.mean(logs(one)) - np.mean(logs(other)))
    assert (difference.mean / difference.error, difference.freedom) == pytest.approx((theirs.statistic, theirs.df))


@pytest.mark.parametrize(("runs", "others"), [(4, 5), (5, 5), (12, 3)])
def test_two_without_common_blocks_are_compared_by_welchs(runs, others):
    random = RANDOM(runs)
    one, other = sample(random, runs, 0.01, 0.02), sample(random, others, 0.05, own="other")
    difference = between(one, other)
    theirs = stats.ttest_ind(logs(one), logs(other), equal_var=False)
    assert (difference.runs, difference.is_paired) == (min(runs, others), False)
    assert (difference.mean / difference.error, difference.freedom) == pytest.approx((theirs.statistic, theirs.df))


@pytest.mark.parametrize(("runs", "most"), [(2, 1), (3, 4)])
def test_few_runs_that_are_alike_do_not_borrow_the_freedom_of_many(runs, most):
    one, other = sample(RANDOM(1), runs, 1e-5), sample(RANDOM(2), 20, 0.05, own="other")
    difference = between(one, other)
    assert difference.error == pytest.approx(stats.sem(logs(other)), rel=1e-3)
    assert difference.freedom == most


def test_blocks_that_one_lacks_do_not_count_and_with_hardly_any_the_means_do():
    random = RANDOM(0)
    one, other = dict(sample(random, 6)), dict(sample(random, 6))
    known = between({block: one[block] for block in range(1, 5)}, other)
    one[0] = 100.0
    del one[5], other[0]
    assert between(one, other) == pytest.approx(known)
    # Of five blocks, because others failed: two in common are few, but enough where they are all.
    random = RANDOM(7)
    rates = sample(random, 8)
    one, other = {block: rates[block] for block in range(5)}, {block: rates[block] for block in range(3, 8)}
    common = {block: other[block] for block in (3, 4)}
    assert not between(one, other).is_paired
    assert not between(one, common).is_paired
    assert between({block: one[block] for block in common}, common).is_paired


def test_the_noise_within_blocks_is_the_residual_of_the_two_way_layout():
    table = RANDOM(1).normal(0, 0.1, (4, 5)) + np.linspace(0, 1, 5)
    estimate = Pool([dict(enumerate(np.exp(row).tolist())) for row in table])
    assert estimate.paired == Spread(pytest.approx(squares_about_means(table)), 12)
    assert estimate.unpaired == Spread(pytest.approx(((table - table.mean(1, keepdims=True)) ** 2).sum()), 16)


def test_where_runs_are_missing_the_residual_is_that_of_least_squares():
    table = RANDOM(2).normal(0, 0.1, (4, 5))
    missing = {(0, 1), (2, 4), (3, 0), (3, 1)}
    cells = [cell for cell in np.ndindex(4, 5) if cell not in missing]
    design = np.zeros((len(cells), 9))
    for row, (configuration, block) in enumerate(cells):
        design[row, [configuration, 4 + block]] = 1
    values = np.array([table[cell] for cell in cells])
    fitted = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    samples = [{b: math.exp(table[c, b]) for b in range(5) if (c, b) not in missing} for c in range(4)]
    estimate = Pool(samples).paired
    assert estimate == Spread(pytest.approx(((values - fitted) ** 2).sum()), len(cells) - np.linalg.matrix_rank(design))


def test_sweeps_without_a_common_block_have_the_residuals_of_each():
    sweeps = [[sample(RANDOM(seed), 4, own=f"{sweep}") for seed in (sweep, sweep + 9)] for sweep in range(3)]
    apart = [Pool(sweep).paired for sweep in sweeps]
    assert [one.freedom for one in apart] == [3, 3, 3]
    together = Pool([one for sweep in sweeps for one in sweep]).paired
    assert together == Spread(pytest.approx(sum(one.squares for one in apart)), 9)
    assert Pool([one for one, _ in sweeps]).paired == Spread()  # no block has two runs
    single = Pool([sample(RANDOM(3), 1), {}])
    assert (single.paired, single.unpaired) == (Spread(), Spread())


def test_others_of_the_sweep_are_a_prior_of_the_pair():
    """By hand: the variance of the pair, and of what is left of the layout's residual, by degrees of freedom."""
    table = np.log([[*one.values()] for one in LAYOUTS])
    of_pair = squares_about_means(table[:2])
    share = 1 / 2  # of two degrees of freedom that the third adds: 1 / (1 / (2 * 2) + 3 / (2 * 2))
    squares, freedom = of_pair + share * (squares_about_means(table) - of_pair), 2 + share * 2
    difference = between(*LAYOUTS)
    assert difference.error == pytest.approx(math.sqrt(squares / freedom * 2 / 3))
    assert difference.freedom == pytest.approx(freedom)


def test_others_and_a_prior_are_worth_no_more_than_their_limit():
    """Three runs that are alike by chance must not look like those of a quiet configuration."""
    random = RANDOM(2)
    one, other, *others = (sample(random, 3, own=own) for own in [""] * 40)
    freedoms = between(one, other, *others).freedom, Pool([one, *others]).mean_error(one)[1]
    assert all(2 + 3 < freedom < 2 + 2 * 2 for freedom in freedoms)
    for freedom in (1, 8, 1e9):
        beside = Spread(0.04 * freedom, freedom).as_prior(Spread(0.1, 2))
        assert beside.deviation == pytest.approx(0.2)
        assert beside.freedom == pytest.approx(
            min(1 / (1 / freedom + 1 / PRIOR_FREEDOM), 1 / (1 / (2 * 2) + 3 / (2 * freedom)))
        )
    assert Spread().as_prior(Spread(0.1, 2)) == Spread()


def test_single_runs_say_nothing():
    random = RANDOM(0)
    pairs = [
        (sample(random, 1), sample(random, 50, own="other")),
        (sample(random, 1), sample(random, 1, own="other")),
        ({}, sample(random, 5)),
    ]
    assert [between(*pair) for pair in pairs] == [None] * 3


def test_the_error_of_a_mean_takes_in_all_runs_of_the_sweep():
    own = logs(LAYOUTS[0])
    error, freedom = Pool(LAYOUTS[:1]).mean_error(LAYOUTS[0])
    assert (error, freedom) == pytest.approx((stats.sem(own), 2))
    error, more = Pool(LAYOUTS).mean_error(LAYOUTS[0])
    share = 2 / 5  # of four degrees of freedom: 1 / (1 / (2 * 2) + 3 / (2 * 4))
    squares = [float(np.var(logs(one), ddof=1)) * 2 for one in LAYOUTS]
    assert more == pytest.approx(2 + share * 4)
    assert error == pytest.approx(math.sqrt((squares[0] + share * sum(squares[1:])) / more / 3))
    assert Pool(LAYOUTS).mean_error({0: 1.0, 1: 2.0}) is None


def test_the_geometric_mean_of_one_run_is_that_run():
    assert significance.geometric_mean({0: 0.1 + 0.2}) == 0.1 + 0.2
    assert significance.geometric_mean({0: 2.0, 1: 8.0}) == pytest.approx(4.0)
    assert significance.geometric_mean({}) is None


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
