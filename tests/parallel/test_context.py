"""Which positions each rank has."""

import pytest
import torch

from ptdbench.parallel.context import Positions


def of_ranks(ranks: int, paired: bool) -> list[Positions]:
    return [Positions(ranks, rank, paired) for rank in range(ranks)]


def test_consecutive_and_from_both_ends():
    whole = torch.arange(8)
    assert [positions.share(whole, 0).tolist() for positions in of_ranks(2, False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [positions.share(whole, 0).tolist() for positions in of_ranks(2, True)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions.share(whole, 0).tolist() for positions in of_ranks(4, True)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_paired_positions_balance_work(ranks):
    of_rank = [int((positions.share(torch.arange(24), 0) + 1).sum()) for positions in of_ranks(ranks, True)]
    assert len(set(of_rank)) == 1


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_reassemble_the_sequence(ranks, paired):
    whole = torch.rand(2, 12, 3)
    every = of_ranks(ranks, paired)
    for positions in every:
        share = positions.share(whole, 1)
        numbers = positions.numbers(torch.arange(share.shape[1]))
        assert torch.equal(whole[:, numbers], share)
    shares = [positions.share(whole, 1) for positions in every]
    assert torch.equal(every[0].whole(shares, 1), whole)
