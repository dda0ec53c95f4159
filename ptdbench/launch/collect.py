"""Small collectives on the host: objects, a few numbers, and a barrier.

Never through device memory, where they would wait for the steps in the device's queue and take memory from the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class HostCollectives:
    """Collectives over all ranks of a run, through a CPU process group; ``None`` is the default group.

    Each method is called on all ranks present.
    """

    is_complete = True  #: Whether all ranks are present.

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def gather(self, value: Any) -> list[Any]:
        """See :func:`gather`."""
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def reduce(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Return the elementwise sum or maximum over ranks, in place."""
        dist.all_reduce(numbers, operation, group=self._group)
        return numbers

    def barrier(self) -> None:
        """See :func:`barrier`."""
        dist.barrier(group=self._group)


#: The last one belongs to the run that this process takes part in.
_collectives = [HostCollectives()]


@contextmanager
def through(collectives: HostCollectives) -> Iterator[None]:
    """Use these collectives for the functions below within the context."""
    _collectives.append(collectives)
    try:
        yield
    finally:
        _collectives.pop()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's ``value``, by rank; through ``group``, a CPU group of all ranks, if one is given."""
    return (HostCollectives(group) if group else _collectives[-1]).gather(value)


def most(*numbers: float) -> list[float]:
    """Return the elementwise maximum over ranks; each rank passes the same number of values."""
    return _collectives[-1].reduce(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()


def total(numbers: Tensor) -> Tensor:
    """Return the elementwise sum over ranks of a CPU tensor, in place if all ranks are present."""
    return _collectives[-1].reduce(numbers, dist.ReduceOp.SUM)


def all_ranks_present() -> bool:
    """Return whether all ranks of the run are present."""
    return _collectives[-1].is_complete


def barrier() -> None:
    """Wait until every rank has called this; does not wait for a GPU's queue."""
    _collectives[-1].barrier()
