"""How often ranks are wrong: the sweeps that are made, and what a row asks."""

import math

import numpy as np
import pytest

from benchmarks import ranks_truth
from benchmarks.ranks_truth import DRIFT, ERROR, ERRORS, LAYOUTS, MEMORY, sweep
from ptdbench.comparison import variation

RANDOM = np.random.default_rng


def none(_, layouts, repeats):
    return np.zeros((layouts, repeats))


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_the_deviation_that_is_said(name):
    errors = ERRORS[name](RANDOM(0), 3, 200_000)
    assert math.sqrt(float((errors**2).mean())) == pytest.approx(ERROR, rel=0.02)


def test_made_runs_differ_by_layout_and_drift():
    samples = sweep(RANDOM(1), LAYOUTS, 400, none)
    noise = variation.noise(samples)
    assert noise.unpaired.deviation == pytest.approx(DRIFT, rel=0.2)
    # neighbours of a block are a run apart, or two
    assert noise.paired.deviation == pytest.approx(DRIFT * math.sqrt(1 - math.exp(-4 / 3 / MEMORY)), rel=0.1)
    means = [variation.geometric_mean(sample) for sample in samples]
    assert [mean / means[0] for mean in means] == pytest.approx(LAYOUTS, rel=0.01)


@pytest.mark.parametrize(("seen", "is_met"), [(5, True), (9, True), (20, False)])
def test_a_row_of_identical_layouts_misses_where_chance_does_not_explain_it(seen, is_met):
    assert ranks_truth._row("", seen, 100, most=0.05).is_met == is_met


def test_a_row_of_layouts_that_differ_is_judged_by_its_share():
    assert [ranks_truth._row("", seen, 100, least=0.95).is_met for seen in (94, 95)] == [False, True]


def test_the_repeats_are_those_of_make_bench():
    assert f"parallel=ddp,pdp,fsdp repeat={ranks_truth.BENCH} " in (ranks_truth.ROOT / "Makefile").read_text()
