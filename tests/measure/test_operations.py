"""Collective operations: what each sends and must receive, and the rates of their links."""

import functools
import itertools
import warnings

import pytest
import torch

from ptdbench.measure.operations import DTYPES, OPERATIONS, GroupRank, largest_exact, sent, verify
from tests.parallel.ranks import pretended

CPU = torch.device("cpu")
ALL = pytest.mark.parametrize("dtype", DTYPES)


def contributions(ranks, count, dtype):
    of = [GroupRank(None, range(ranks), rank, CPU, DTYPES[dtype]) for rank in range(ranks)]
    return [rank.contributed(count) for rank in of], of[0].summed(count)


def combined(given):
    return functools.reduce(torch.add, given)


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_limits_are_exact(name):
    dtype, most = DTYPES[name], largest_exact(DTYPES[name])
    below = torch.tensor([most - 1, most], dtype=torch.int64).to(dtype)
    assert below.to(torch.int64).tolist() == [most - 1, most]


@ALL
@pytest.mark.parametrize("ranks", [2, 3, 8, 40])
def test_sum_is_exact_in_any_order(dtype, ranks):
    given, expected = contributions(ranks, 600, dtype)
    for order in (given, given[::-1], given[1::2] + given[::2]):
        result = combined(order)
        assert result.dtype == DTYPES[dtype]
        assert torch.equal(result, expected)


@ALL
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_missing_or_wrong_rank_changes_the_result(dtype, ranks):
    given, expected = contributions(ranks, 150, dtype)
    for wrong in range(ranks):
        others = given[:wrong] + given[wrong + 1 :]
        for instead in ([], *([one] for one in others)):
            assert not torch.equal(combined(others + instead), expected), (wrong, instead)


@ALL
def test_rank_counted_twice_changes_the_result(dtype):
    given, expected = contributions(4, 150, dtype)
    for twice in given:
        assert not torch.equal(combined([expected, twice]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sources_differ_at_every_element(dtype):
    shares = [sent(source, 1000, DTYPES[dtype], CPU) for source in range(0, 113, 7)]
    for one, other in itertools.combinations(shares, 2):
        assert (one != other).all()


@pytest.mark.parametrize("count", [1, 2, 112, 113, 114, 50_000])
def test_neighboring_elements_differ(count):
    data = sent(5, count, DTYPES["int8"], CPU)
    assert data.shape == (count,)
    assert (data[1:] != data[:-1]).all()
    assert 1 <= data.min() <= data.max() <= 113


def test_operations_raise_no_deprecation():
    place = GroupRank(None, [0], 0, CPU, DTYPES["fp32"])
    with pretended(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, operation in OPERATIONS.items():
            verify(operation.prepare(place, 4), name, place)


#: The factors of doc/PERFORMANCE.md worked out by hand.
_PARTS, _WHOLE = {2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875}, {2: 1, 3: 1, 4: 1, 8: 1}
WORKED = {
    "all_reduce": {2: 1, 3: 4 / 3, 4: 1.5, 8: 1.75}, "broadcast": _WHOLE, "reduce": _WHOLE,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), _PARTS),
}  # fmt: skip


@pytest.mark.parametrize("op", WORKED)
def test_bus_bandwidth_of_worked_examples(op):
    assert {ranks: OPERATIONS[op].bus_factor(ranks) for ranks in (2, 3, 4, 8)} == pytest.approx(WORKED[op])


def test_a_barrier_moves_no_data():
    assert {op for op, operation in OPERATIONS.items() if operation.bus_factor is None} == OPERATIONS.keys() - WORKED
