"""Which positions each rank has."""

import pytest
import torch

from ptdbench.parallel.context import Positions


def of_ranks(ranks: int, paired: bool) -> list[Positions]:
    return [Positions(ranks, rank, paired) for rank in range(ranks)]


def test_consecutive_and_from_both_ends():
    whole = torch.arange(8)
    assert [one.own(whole, 0).tolist() for one in of_ranks(2, False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one.own(whole, 0).tolist() for one in of_ranks(2, True)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [one.own(whole, 0).tolist() for one in of_ranks(4, True)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_paired_positions_balance_work(ranks):
    of_rank = [int((one.own(torch.arange(24), 0) + 1).sum()) for one in of_ranks(ranks, True)]
    assert len(set(of_rank)) == 1


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_reassemble_the_sequence(ranks, paired):
    whole = torch.rand(2, 12, 3)
    found = of_ranks(ranks, paired)
    for one in found:
        own = one.own(whole, 1)
        numbers = one.numbers(torch.arange(own.shape[1]))
        assert torch.equal(whole[:, numbers], own)
    shares = [one.own(whole, 1) for one in found]
    assert torch.equal(found[0].whole(shares, 1), whole)
