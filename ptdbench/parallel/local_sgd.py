"""Local SGD: copies train on their own, and average their weights every few steps (Stich 2019, arXiv 1805.09767)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from ptdbench.local_part import local_part

#: The label of an average in a trace.
LABEL = "local SGD"

#: Bytes of one message, except for larger weights.
_MESSAGE = 100 << 20


class LocalSGD:
    """Averages the weights of a module's copies every few steps; between that they exchange nothing.

    The optimizer's state remains each copy's own, as in torch's ``PostLocalSGDOptimizer``. Not torch's
    ``PeriodicModelAverager``: it copies all weights into one buffer, and lets the weights point into that.

    Args:
        module: This rank's part of a copy.
        group: The ranks with the same part of each copy.
        every: Steps from one average to the next.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, every: int) -> None:
        self._weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        self._group = group
        self._every = every
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the optimizer of the weights, whose state belongs to a checkpoint."""
        self._optimizer = optimizer

    def after_step(self, number: int) -> None:
        """Average the weights if it is time after step ``number``, counted from 0 over the whole run."""
        if (number + 1) % self._every == 0:
            with record_function(LABEL):
                average((local_part(weight.detach()) for weight in self._weights.values()), self._group)

    @contextmanager
    def averaged(self, *, with_state: bool) -> Iterator[dict[str, Tensor]]:
        """A context in which weights and buffers, such as the statistics of batch norms, are the averages.

        Afterwards they are this copy's own, bit for bit.

        Args:
            with_state: Whether the optimizer's state is averaged too.

        Yields:
            What is this copy's own, by name; in host memory, where there is more room.
        """
        tensors = self._tensors(with_state)
        own = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        average(tensors.values(), self._group)
        try:
            yield own
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(own[name])

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Continue with what :meth:`averaged` yielded with the optimizer's state."""
        for name, tensor in self._tensors(with_state=True).items():
            tensor.copy_(own[name])

    def fits(self, own: Mapping[str, Tensor]) -> bool:
        """Whether this was yielded under the same layout."""
        here, there = (
            {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
            for found in (self._tensors(with_state=True), own)
        )
        return here == there

    def _tensors(self, with_state: bool) -> dict[str, Tensor]:
        """What differs between copies, by name: the local parts on this rank, which share memory with the run."""
        found = {name: local_part(weight.detach()) for name, weight in (self._weights | self._buffers).items()}
        if with_state and self._optimizer:
            for name, weight in self._weights.items():
                for key, value in self._optimizer.state.get(weight, {}).items():
                    if isinstance(value, Tensor) and value.dim() > 0:  # all count the same steps
                        found[f"{name}.{key}"] = local_part(value.detach())
        return found


def average(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their means over the ranks of a group, which call this with tensors of the same shapes."""
    for some in _messages(tensors):
        mean = torch.cat([tensor.reshape(-1) for tensor in some])
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        for tensor, of_it in zip(some, mean.split([tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(of_it.view_as(tensor))


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors that hold numbers in their order, as many at once as are alike and fit into a message."""
    some: list[Tensor] = []
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        alike = not some or (tensor.dtype, tensor.device) == (some[0].dtype, some[0].device)
        if not alike or (some and sum(one.nbytes for one in some) + tensor.nbytes > _MESSAGE):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
