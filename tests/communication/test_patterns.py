"""Data whose journey shows: exact in every dtype, and different wherever something went wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

from ptdbench.communication.patterns import DTYPES, REDUCTIONS, contributed, reduced, sent

CPU = torch.device("cpu")
ALL = pytest.mark.parametrize(("dtype", "reduction"), list(itertools.product(DTYPES, REDUCTIONS)))


def contributions(ranks, count, dtype, reduction):
    return [contributed(s, ranks, count, DTYPES[dtype], REDUCTIONS[reduction], CPU) for s in range(ranks)]


@pytest.mark.parametrize("name", DTYPES)
def test_the_limits_of_a_dtype(name):
    dtype = DTYPES[name]
    below = torch.tensor([dtype.exact - 1, dtype.exact], dtype=torch.int64).to(dtype.torch)
    assert below.to(torch.int64).tolist() == [dtype.exact - 1, dtype.exact]
    largest = torch.tensor(2.0, dtype=torch.float64).pow(dtype.doublings)
    assert largest.to(dtype.torch).to(torch.float64) == largest


@ALL
@pytest.mark.parametrize("ranks", [2, 3, 8, 40])
def test_the_result_is_exact_in_any_order(dtype, reduction, ranks):
    given = contributions(ranks, 600, dtype, reduction)
    combine = REDUCTIONS[reduction].combine
    expected = reduced(ranks, 600, DTYPES[dtype], REDUCTIONS[reduction], CPU)
    for order in (given, given[::-1], given[1::2] + given[::2]):
        result = order[0]
        for one in order[1:]:
            result = combine(result, one)
        assert result.dtype == DTYPES[dtype].torch
        assert torch.equal(result, expected)


@ALL
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_that_is_missing_or_stands_for_another_shows(dtype, reduction, ranks):
    given = contributions(ranks, 150, dtype, reduction)
    expected = reduced(ranks, 150, DTYPES[dtype], REDUCTIONS[reduction], CPU)
    for wrong in range(ranks):
        for instead in [None, *(rank for rank in range(ranks) if rank != wrong)]:
            mixed = [given[rank] for rank in range(ranks) if rank != wrong]
            mixed += [] if instead is None else [given[instead]]
            result = mixed[0]
            for one in mixed[1:]:
                result = REDUCTIONS[reduction].combine(result, one)
            assert not torch.equal(result, expected), (wrong, instead)


@pytest.mark.parametrize(("dtype", "reduction"), list(itertools.product(DTYPES, ["sum", "product"])))
def test_a_rank_that_counts_twice_shows(dtype, reduction):
    given = contributions(4, 150, dtype, reduction)
    expected = reduced(4, 150, DTYPES[dtype], REDUCTIONS[reduction], CPU)
    for rank in range(4):
        assert not torch.equal(REDUCTIONS[reduction].combine(expected, given[rank]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sources_differ_at_every_element(dtype):
    shares = [sent(source, 1000, DTYPES[dtype], CPU) for source in range(113)]
    for one, other in itertools.combinations(shares[::7], 2):
        assert (one != other).all()


def test_later_sources_differ_too():
    first, later = (sent(source, 1000, DTYPES["int8"], CPU) for source in (0, 113))
    assert torch.equal(first[:113], later[:113])
    assert (first != later)[113:].all()


@pytest.mark.parametrize("count", [1, 2, 112, 113, 12_769, 12_770, 50_000])
def test_a_shifted_element_shows_and_the_count_is_right(count):
    data = sent(5, count, DTYPES["int8"], CPU)
    assert data.shape == (count,)
    assert (data[1:] != data[:-1]).all()
    assert data.min() >= 1
