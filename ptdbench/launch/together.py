"""What ranks tell each other beside their work: objects, a few numbers, and that they have come this far.

Never through device memory, where it would have to wait for the steps in the device's queue, and take memory that is
the model's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class _Circle(Protocol):
    """How the ranks of a run reach each other; each method is called in all ranks that are there."""

    def gather(self, value: Any) -> list[Any]: ...

    def reduce(self, numbers: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor: ...

    def barrier(self) -> None: ...


class _All:
    """Every rank is there: they use a process group on the CPU; ``None`` for the default one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def gather(self, value: Any) -> list[Any]:
        return gathered(value, self._group)

    def reduce(self, numbers: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(numbers, how, group=self._group)
        return numbers

    def barrier(self) -> None:
        dist.barrier(group=self._group)


class Some:
    """Some ranks of a run are there, and use a store; each absent one is taken for the last one before it that is.

    Args:
        present: The ranks that are there, in ascending order.
        rank: This one.
        size: Ranks of the run.
        store: A store of the present ranks.
    """

    def __init__(self, present: Sequence[int], rank: int, size: int, store: dist.Store) -> None:
        self._present, self._rank, self._store = present, rank, store
        self._answers_for = [max((one for one in present if one <= rank), default=present[0]) for rank in range(size)]
        self._number = 0

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, or who answers for it."""
        said = self._say(value)
        return [said[rank] for rank in self._answers_for]

    def reduce(self, numbers: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        """The sum or the maximum over the present ranks."""
        said = torch.stack(list(self._say(numbers).values()))
        return said.sum(0) if how == dist.ReduceOp.SUM else said.amax(0)

    def barrier(self) -> None:
        """Wait for the present ranks."""
        self._say(None)

    def _say(self, value: Any) -> dict[int, Any]:
        """What each present rank says, by rank; they all ask in the same order."""
        self._number += 1
        self._store.set(f"said {self._number} {self._rank}", pickle.dumps(value))
        return {rank: pickle.loads(self._store.get(f"said {self._number} {rank}")) for rank in self._present}


#: The last one is that of the run that this process takes part in.
_circles: list[_Circle] = [_All()]


@contextmanager
def through(circle: dist.ProcessGroup | Some | None) -> Iterator[None]:
    """Meanwhile the ranks use this process group, or this store."""
    _circles.append(circle if isinstance(circle, Some) else _All(circle))
    try:
        yield
    finally:
        _circles.pop()


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``, by rank."""
    return _circles[-1].gather(value)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's ``value``, by its rank in ``group``."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def most(*numbers: float) -> list[float]:
    """The elementwise maximum over ranks, each of which has as many numbers."""
    return _circles[-1].reduce(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()


def total(numbers: Tensor) -> Tensor:
    """The elementwise sum over ranks, in place where all are there.

    Args:
        numbers: On the CPU, and of the same shape and dtype on every rank.
    """
    return _circles[-1].reduce(numbers, dist.ReduceOp.SUM)


def barrier() -> None:
    """Wait until every rank has come here; on a GPU not for its queue."""
    _circles[-1].barrier()
