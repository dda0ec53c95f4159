"""Weights shared by two stages (GPT: embedding and head are one matrix), and the sum of their two gradients.

Each stage has its own copy, also where both are on one rank: DDP and FSDP, which take hold of a stage's weights, would
otherwise reduce the gradient twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptdbench.local_part import local_part
from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel.pipeline.stage import Cut

Tied = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Shared:
    """This rank's copies of a weight that is in two stages.

    Attributes:
        first: The copy to use if the weight must be counted once, whole or in shards; ``None`` on another rank.
        second: The other copy; ``None`` on another rank.
        peer: Global rank of the process with the copy that is not here, or its shard of it, in the same replica.
    """

    first: nn.Parameter | None
    second: nn.Parameter | None
    peer: int | None


def untie(model: Model, tied: Tied, cut: Cut) -> None:
    """Give the second of two stages of one rank its own copy of a weight that both use, on the same device."""
    module = module_of(model)
    for first, second in tied:
        one, other = cut.owner(first), cut.owner(second)
        if one != other and cut.ranks[one] == cut.ranks[other]:
            weight = module.get_parameter(first)
            path, _, leaf = second.rpartition(".")
            setattr(module.get_submodule(path), leaf, nn.Parameter(weight.detach().clone(), weight.requires_grad))


def find(tied: Tied, module: nn.Module, cut: Cut, group: dist.ProcessGroup) -> list[Shared]:
    """Find the shared weights on a rank; two copies on it are made equal.

    Args:
        tied: Pairs of full names of weights that are one, see :meth:`ptdbench.models.protocol.Model.tied`.
        module: This rank's part, with the names of the whole model.
        cut: The stages and their ranks.
        group: The ranks of the pipeline.
    """
    here = dict(module.named_parameters())
    mine = dist.get_rank(group)
    found = []
    for names in tied:
        stages = [cut.owner(name) for name in names]
        ranks = [cut.ranks[stage] for stage in stages]
        if stages[0] == stages[1] or mine not in ranks:
            continue
        first, second = (here[name] if rank == mine else None for name, rank in zip(names, ranks, strict=True))
        peer = next((dist.get_global_rank(group, rank) for rank in ranks if rank != mine), None)
        found.append(Shared(first, second, peer))
        if first is not None and second is not None:
            local_part(second.detach()).copy_(local_part(first.detach()))
    return found


def add_up(weights: Sequence[Shared], group: dist.ProcessGroup) -> None:
    """Sum the two gradients of each shared weight, so that both copies take the same step."""
    for one in weights:
        gradients = [_gradient(copy) for copy in (one.first, one.second) if copy is not None]
        if one.peer is None:
            total = gradients[0] + gradients[1]
            for gradient in gradients:
                gradient.copy_(total)
        else:
            gradients[0] += _exchange(gradients[0], one.peer, group)


def _exchange(mine: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """What ``peer`` sends in exchange for ``mine``."""
    theirs = torch.empty_like(mine)
    exchange = [
        dist.P2POp(dist.isend, mine.contiguous(), peer, group),
        dist.P2POp(dist.irecv, theirs, peer, group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return theirs


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return local_part(weight.grad)
