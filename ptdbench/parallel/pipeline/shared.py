"""Weights shared by two stages (GPT: embedding and head are one matrix), and the sum of their two gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptdbench.parallel.pipeline.stage import Cut


@dataclass(frozen=True)
class Shared:
    """This rank's copy of a weight that is also in a stage of another rank.

    Attributes:
        weight: This rank's copy, whole or in shards.
        peer: Global rank of the process with the other copy, or its shard of it, in the same replica.
        is_first: Whether this is the copy to use if the weight must be counted once.
    """

    weight: nn.Parameter
    peer: int
    is_first: bool


def find(tied: Sequence[tuple[str, str]], module: nn.Module, cut: Cut, group: dist.ProcessGroup) -> list[Shared]:
    """Find the shared weights on a rank.

    Args:
        tied: Pairs of full names of weights that are one, see :meth:`ptdbench.models.protocol.Model.tied`.
        module: This rank's part, with the names of the whole model.
        cut: The stages and their ranks.
        group: The ranks of the pipeline.
    """
    here = dict(module.named_parameters())
    mine = dist.get_rank(group)
    found = []
    for first, second in tied:
        holders = {name: cut.ranks[cut.owner(name)] for name in (first, second)}
        for own, other in ((first, second), (second, first)):
            if holders[own] == mine != holders[other]:
                found.append(Shared(here[own], dist.get_global_rank(group, holders[other]), own == first))
    return found


def add_up(weights: Sequence[Shared], group: dist.ProcessGroup) -> None:
    """Sum the two gradients of each shared weight, so that both copies take the same step."""
    for one in weights:
        assert one.weight.grad is not None
        mine = _here(one.weight.grad)
        theirs = torch.empty_like(mine)
        exchange = [
            dist.P2POp(dist.isend, mine.contiguous(), one.peer, group),
            dist.P2POp(dist.irecv, theirs, one.peer, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine += theirs


def _here(gradient: Tensor) -> Tensor:
    """The local part of a gradient that may be sharded."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
