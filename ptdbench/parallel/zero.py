"""ZeRO-1: shards the optimizer state over replicas; each replica broadcasts the weights that it updates.

torch's ``ZeroRedundancyOptimizer`` keeps its state in an inner optimizer with separate parameter groups, and gathers it
on one rank to save it. Here the optimizer keeps the parameter groups, gradients and names of all weights, but each
replica holds only the state of its part. Clipping, loss scaling, schedules and checkpoints therefore
work as without ZeRO-1, and a checkpoint can be resumed under any layout.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: Bytes of one message, except for larger weights.
_MESSAGE = 25 << 20


class Zero1:
    """Assigns each replicated weight of a module, unsplit, to one rank of a group."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        owners = assign_owners([weight.numel() for weight in trained], dist.get_world_size(group))
        self._owners = dict(zip(trained, owners, strict=True))
        self._others = [weight for weight, owner in self._owners.items() if owner != dist.get_rank(group)]
        self._group = group

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of all weights update only this replica's part, and receive the rest after each step."""
        for weight in self._others:
            optimizer.state.pop(weight, None)  # some optimizers create state before the first step
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._share)

    @torch.no_grad()
    def _share(self, *_: Any) -> None:
        """Broadcast this replica's part of the weights, and receive the other parts."""
        for owner in range(dist.get_world_size(self._group)):
            weights = [weight.detach() for weight, its in self._owners.items() if its == owner]
            if weights:  # coalesced into few messages, as DDP itself broadcasts weights
                dist._broadcast_coalesced(self._group, weights, _MESSAGE, owner)

    def _before_step(self, *_: Any) -> None:
        """Drop the gradients of other replicas' weights: an optimizer skips these, and creates no state for them."""
        for weight in self._others:
            weight.grad = None


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Assign weights of these sizes to replicas: the largest first, each to the replica with the fewest elements."""
    owners, elements = [0] * len(sizes), [0] * replicas
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = elements.index(min(elements))
        elements[owners[number]] += sizes[number]
    return owners
