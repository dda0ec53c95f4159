"""The collective operations of ``torch.distributed``, each prepared at one size for repeated calls.

The size of a message is that of the whole: if every rank holds a share (``scatter``, ``gather``, ``all_gather``,
``reduce_scatter``, ``all_to_all``), the sum of all shares, as in nccl-tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.measure.patterns import Dtype, Reduction, contributed, reduced, sent
from ptdbench.virtual.machine import is_virtual


@dataclass(frozen=True)
class Place:
    """One rank of a group."""

    group: dist.ProcessGroup | None  #: The process group; ``None`` for all ranks of the run.
    ranks: Sequence[int]  #: Global ranks of the group; the first one is the root of rooted operations.
    index: int  #: This rank's index in the group.
    device: torch.device  #: This rank's device.
    dtype: Dtype  #: Dtype of the message.
    reduction: Reduction  #: The reduction, if the operation reduces.

    @property
    def root(self) -> int:
        """The global rank of the root."""
        return self.ranks[0]

    def empty(self, count: int) -> Tensor:
        """Make a tensor of ``count`` zeros."""
        return torch.zeros(count, dtype=self.dtype.torch, device=self.device)

    def sent(self, source: int, count: int) -> Tensor:
        """Return the pattern that ``source`` sends (:func:`ptdbench.measure.patterns.sent`)."""
        return sent(source, count, self.dtype, self.device)

    def contributed(self, count: int) -> Tensor:
        """Return this rank's input of a reduction."""
        return contributed(self.index, len(self.ranks), count, self.dtype, self.reduction, self.device)

    def reduced(self, count: int) -> Tensor:
        """Return the expected result of the reduction."""
        return reduced(len(self.ranks), count, self.dtype, self.reduction, self.device)


@dataclass(frozen=True)
class Message:
    """One operation at one size, on one rank."""

    #: Runs the operation; with ``True`` it is asynchronous and returns the work to wait for.
    call: Callable[[bool], dist.Work | None]
    given: Tensor | None = None  #: This rank's input; ``None`` if it has none.
    result: Tensor | None = None  #: This rank's result, possibly ``given`` itself; ``None`` if it gets none.
    fill: Callable[[], Tensor] | None = None  #: Content of ``given`` before a call whose result is checked.
    expected: Callable[[], Tensor] | None = None  #: Content of ``result`` after it.


@dataclass(frozen=True)
class Operation:
    """A collective operation."""

    #: Makes the message for a rank and a number of elements: of a share if there are shares, else in all.
    prepare: Callable[[Place, int], Message]
    has_shares: bool = False  #: Whether each rank holds its share of the whole.
    reduces: bool = False  #: Whether it takes a reduction.

    def count(self, size: int, ranks: int, item_bytes: int) -> int:
        """Return the elements of a message of about ``size`` bytes, at least one: per share if there are shares."""
        return max(1, size // (item_bytes * (ranks if self.has_shares else 1)))

    def bytes(self, count: int, ranks: int, item_bytes: int) -> int:
        """Return the bytes of the whole message with the ``count`` of :meth:`count`."""
        return count * item_bytes * (ranks if self.has_shares else 1)


def _broadcast(at: Place, count: int) -> Message:
    data = at.empty(count)
    return Message(
        lambda asynchronous: dist.broadcast(data, at.root, group=at.group, async_op=asynchronous),
        given=data,
        result=data,
        fill=lambda: at.sent(0, count) if at.index == 0 else at.empty(count),
        expected=lambda: at.sent(0, count),
    )


def _reduce(at: Place, count: int, to_all: bool = False) -> Message:
    data = at.empty(count)
    reduce = dist.all_reduce if to_all else partial(dist.reduce, dst=at.root)
    return Message(
        lambda asynchronous: reduce(data, op=at.reduction.op, group=at.group, async_op=asynchronous),
        given=data,
        result=data if to_all or at.index == 0 else None,
        fill=lambda: at.contributed(count),
        expected=lambda: at.reduced(count),
    )


def _scatter(at: Place, count: int) -> Message:
    ranks = len(at.ranks)
    share = at.empty(count)
    whole = at.empty(count * ranks) if at.index == 0 else None
    shares = None if whole is None else list(whole.chunk(ranks))
    return Message(
        lambda asynchronous: dist.scatter(share, shares, at.root, group=at.group, async_op=asynchronous),
        given=whole,
        result=share,
        fill=lambda: torch.cat([at.sent(index, count) for index in range(ranks)]),
        expected=lambda: at.sent(at.index, count),
    )


def _gather(at: Place, count: int, to_all: bool = False) -> Message:
    ranks = len(at.ranks)
    share = at.empty(count)
    whole = at.empty(count * ranks) if to_all or at.index == 0 else None

    def gather(asynchronous: bool) -> dist.Work | None:
        if to_all:
            assert whole is not None
            return dist.all_gather_into_tensor(whole, share, group=at.group, async_op=asynchronous)
        shares = None if whole is None else list(whole.chunk(ranks))
        return dist.gather(share, shares, at.root, group=at.group, async_op=asynchronous)

    return Message(
        gather,
        given=share,
        result=whole,
        fill=lambda: at.sent(at.index, count),
        expected=lambda: torch.cat([at.sent(index, count) for index in range(ranks)]),
    )


def _reduce_scatter(at: Place, count: int) -> Message:
    ranks = len(at.ranks)
    whole, share = at.empty(count * ranks), at.empty(count)
    return Message(
        lambda asynchronous: dist.reduce_scatter_tensor(
            share, whole, at.reduction.op, group=at.group, async_op=asynchronous
        ),
        given=whole,
        result=share,
        fill=lambda: at.contributed(count * ranks),
        expected=lambda: at.reduced(count * ranks).chunk(ranks)[at.index],
    )


def _all_to_all(at: Place, count: int) -> Message:
    """Send from ``a`` to ``b`` the pattern of source ``a * ranks + b``."""
    ranks = len(at.ranks)
    given, result = at.empty(count * ranks), at.empty(count * ranks)
    return Message(
        lambda asynchronous: dist.all_to_all_single(result, given, group=at.group, async_op=asynchronous),
        given=given,
        result=result,
        fill=lambda: torch.cat([at.sent(at.index * ranks + other, count) for other in range(ranks)]),
        expected=lambda: torch.cat([at.sent(other * ranks + at.index, count) for other in range(ranks)]),
    )


OPERATIONS: dict[str, Operation] = {
    "broadcast": Operation(_broadcast),
    "reduce": Operation(_reduce, reduces=True),
    "all_reduce": Operation(partial(_reduce, to_all=True), reduces=True),
    "scatter": Operation(_scatter, has_shares=True),
    "gather": Operation(_gather, has_shares=True),
    "all_gather": Operation(partial(_gather, to_all=True), has_shares=True),
    "reduce_scatter": Operation(_reduce_scatter, has_shares=True, reduces=True),
    "all_to_all": Operation(_all_to_all, has_shares=True),
    "barrier": Operation(lambda at, _: Message(partial(dist.barrier, at.group))),
}


def lacking(backend: str, device_type: str) -> list[str]:
    """List the operations that a backend does not have for tensors of a device.

    According to the table of backends in the documentation of ``torch.distributed``: gloo works on host memory, and
    supports only two operations on GPU tensors. A barrier has no tensor.
    """
    if (backend, device_type) != ("gloo", "cuda"):
        return []
    return [name for name in OPERATIONS if name not in ("broadcast", "all_reduce", "barrier")]


def verify(message: Message, name: str, place: Place, asynchronous: bool) -> None:
    """Run the operation of that name and size once on a test pattern; raises ArithmeticError if the result is wrong."""
    if message.result is not None:
        message.result.zero_()
    if message.given is not None and message.fill:
        message.given.copy_(message.fill())
    work = message.call(asynchronous)
    if work is not None:
        work.wait()
    if message.result is not None and message.expected:
        compare(message.result, message.expected(), name, place.ranks[place.index])
    if message.given is not None:
        message.given.fill_(place.reduction.idle)  # unchanged by any number of reductions


def compare(result: Tensor, expected: Tensor, name: str, rank: int) -> None:
    """Raise ArithmeticError if the two differ, with the first wrong element, its value and the expected one.

    Nothing is compared on a virtual GPU, which neither computes nor moves them.
    """
    if (result.is_cuda and is_virtual(torch.cuda.get_device_name(result.device))) or torch.equal(result, expected):
        return
    wrong = (result != expected).nonzero().flatten()
    first = int(wrong[0])
    raise ArithmeticError(
        f"{name}: rank {rank} has {result[first].item():g} at element {first} and not {expected[first].item():g}; "
        f"{len(wrong)} of {result.numel()} elements are wrong"
    )
