"""ZeRO-1: replicas divide the optimizer's state, and each sends the weights that it has updated to the others.

Not torch's ``ZeroRedundancyOptimizer``: its state is that of an optimizer inside it with parameter groups of its own,
and has to be collected on one rank to be saved. Here the optimizer stays the optimizer, with the parameter groups, the
gradients and the names of all weights; each replica only has the state of its own part. So clipping, loss scaling,
schedules, averages of weights and checkpoints work as without it, and a checkpoint can be resumed under any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: Bytes of one message, except for larger weights.
_MESSAGE = 25 << 20


class Zero1:
    """Divides the weights of a module, equal in all replicas, among the ranks of a group, each weight whole."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        owners = assign_owners([weight.numel() for weight in trained], dist.get_world_size(group))
        self._owners = dict(zip(trained, owners, strict=True))
        self._group = group

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of all weights update this replica's part in each step, and get the others from theirs."""
        for weight in self._others():
            optimizer.state.pop(weight, None)  # some optimizers create state before the first step
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self.share())

    @torch.no_grad()
    def share(self) -> None:
        """Send this replica's part of the weights to the others, and receive theirs; called in all replicas."""
        for owner in range(dist.get_world_size(self._group)):
            weights = [weight.detach() for weight, its in self._owners.items() if its == owner]
            if weights:  # all in as few messages as DDP itself sends the weights in
                dist._broadcast_coalesced(self._group, weights, _MESSAGE, owner)

    def _before_step(self, *_: Any) -> None:
        """An optimizer skips weights without a gradient, and creates no state for them."""
        for weight in self._others():
            weight.grad = None

    def _others(self) -> list[nn.Parameter]:
        here = dist.get_rank(self._group)
        return [weight for weight, owner in self._owners.items() if owner != here]


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """The owner of each of the weights with these sizes: the largest first, each to the replica with the least."""
    owners, held = [0] * len(sizes), [0] * replicas
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = held.index(min(held))
        held[owners[number]] += sizes[number]
    return owners
