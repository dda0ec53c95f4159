"""Small collectives on the host: objects, a few numbers, and a barrier.

Never through device memory, where it would have to wait for the steps in the device's queue, and take memory that is
the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Circle:
    """The ranks of a run, all of them, reach each other through a process group on the CPU; ``None``: the default one.

    Each method is called on all ranks that are there.
    """

    is_complete = True  #: Whether every rank is there.

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def gather(self, value: Any) -> list[Any]:
        """See :func:`gather`."""
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def reduce(self, numbers: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        """Return the elementwise sum or maximum, in place."""
        dist.all_reduce(numbers, how, group=self._group)
        return numbers

    def barrier(self) -> None:
        """See :func:`barrier`."""
        dist.barrier(group=self._group)


#: The last one is that of the run that this process takes part in.
_circles = [Circle()]


@contextmanager
def through(circle: Circle) -> Iterator[None]:
    """Let the ranks reach each other so meanwhile."""
    _circles.append(circle)
    try:
        yield
    finally:
        _circles.pop()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's ``value``, by rank; through a ``group`` of all ranks on the CPU where one is given."""
    return (Circle(group) if group else _circles[-1]).gather(value)


def most(*numbers: float) -> list[float]:
    """Return the elementwise maximum over ranks, each of which has as many numbers."""
    return _circles[-1].reduce(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()


def total(numbers: Tensor) -> Tensor:
    """Return the elementwise sum over ranks of a tensor on the CPU, in place where all are there."""
    return _circles[-1].reduce(numbers, dist.ReduceOp.SUM)


def are_all_there() -> bool:
    """Return whether every rank of the run is carried out."""
    return _circles[-1].is_complete


def barrier() -> None:
    """Wait until every rank has come here; on a GPU not for its queue."""
    _circles[-1].barrier()
