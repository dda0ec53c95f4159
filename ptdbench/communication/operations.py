"""The collective operations of ``torch.distributed``: each at one size, ready to be called again and again.

The size of a message is that of the whole: where every rank holds a share of it (``scatter``, ``gather``,
``all_gather``, ``reduce_scatter``, ``all_to_all``), all shares together, as nccl-tests counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.communication.patterns import Dtype, Reduction, contributed, reduced, sent


@dataclass(frozen=True)
class Place:
    """One rank among those that take part.

    Attributes:
        group: They; ``None`` for all ranks of the run.
        ranks: Their numbers in the run; the first one is the root where there is one.
        index: This rank's number among them.
        device: This rank's device.
        dtype: What is sent.
        reduction: What becomes of it, where it is reduced.
    """

    group: dist.ProcessGroup | None
    ranks: Sequence[int]
    index: int
    device: torch.device
    dtype: Dtype
    reduction: Reduction

    @property
    def root(self) -> int:
        """The root's number in the run."""
        return self.ranks[0]

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.index == 0

    def empty(self, count: int) -> Tensor:
        """Room for so many elements."""
        return torch.zeros(count, dtype=self.dtype.torch, device=self.device)

    def sent(self, source: int, count: int) -> Tensor:
        """What ``source`` sends (:func:`ptdbench.communication.patterns.sent`)."""
        return sent(source, count, self.dtype, self.device)

    def contributed(self, count: int) -> Tensor:
        """What this rank puts into a reduction."""
        return contributed(self.index, len(self.ranks), count, self.dtype, self.reduction, self.device)

    def reduced(self, count: int) -> Tensor:
        """What comes out of it."""
        return reduced(len(self.ranks), count, self.dtype, self.reduction, self.device)


@dataclass(frozen=True)
class Message:
    """One operation at one size, on one rank.

    Attributes:
        call: Does it; given ``True`` it only begins, and returns what to wait for.
        given: What this rank passes; ``None`` where that is nothing.
        result: Where this rank finds what came of it, maybe ``given`` itself; ``None`` where it gets nothing.
        fill: What ``given`` holds before a call whose result is checked.
        expected: What ``result`` holds after it.
    """

    call: Callable[[bool], dist.Work | None]
    given: Tensor | None = None
    result: Tensor | None = None
    fill: Callable[[], Tensor] | None = None
    expected: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Operation:
    """What can be done with a message.

    Attributes:
        prepare: For a rank and a number of elements: of a share where there are shares, else of the whole.
        has_shares: Whether each rank holds its share of the whole.
        reduces: Whether it takes a reduction.
    """

    prepare: Callable[[Place, int], Message]
    has_shares: bool = False
    reduces: bool = False

    def count(self, size: int, ranks: int, item_bytes: int) -> int:
        """Elements of a message of about ``size`` bytes, at least one: of a share where there are shares."""
        return max(1, size // (item_bytes * (ranks if self.has_shares else 1)))

    def bytes(self, count: int, ranks: int, item_bytes: int) -> int:
        """The size of the whole message that :meth:`count` came to."""
        return count * item_bytes * (ranks if self.has_shares else 1)


def _broadcast(at: Place, count: int) -> Message:
    data = at.empty(count)
    return Message(
        lambda asynchronous: dist.broadcast(data, at.root, group=at.group, async_op=asynchronous),
        given=data,
        result=data,
        fill=lambda: at.sent(0, count) if at.is_root else at.empty(count),
        expected=lambda: at.sent(0, count),
    )


def _reduce(at: Place, count: int) -> Message:
    data = at.empty(count)
    return Message(
        lambda asynchronous: dist.reduce(data, at.root, at.reduction.op, group=at.group, async_op=asynchronous),
        given=data,
        result=data if at.is_root else None,
        fill=lambda: at.contributed(count),
        expected=lambda: at.reduced(count),
    )


def _all_reduce(at: Place, count: int) -> Message:
    data = at.empty(count)
    return Message(
        lambda asynchronous: dist.all_reduce(data, at.reduction.op, group=at.group, async_op=asynchronous),
        given=data,
        result=data,
        fill=lambda: at.contributed(count),
        expected=lambda: at.reduced(count),
    )


def _scatter(at: Place, count: int) -> Message:
    ranks = len(at.ranks)
    share = at.empty(count)
    whole = at.empty(count * ranks) if at.is_root else None
    shares = None if whole is None else list(whole.chunk(ranks))
    return Message(
        lambda asynchronous: dist.scatter(share, shares, at.root, group=at.group, async_op=asynchronous),
        given=whole,
        result=share,
        fill=lambda: torch.cat([at.sent(index, count) for index in range(ranks)]),
        expected=lambda: at.sent(at.index, count),
    )


def _gather(at: Place, count: int) -> Message:
    ranks = len(at.ranks)
    share = at.empty(count)
    whole = at.empty(count * ranks) if at.is_root else None
    shares = None if whole is None else list(whole.chunk(ranks))
    return Message(
        lambda asynchronous: dist.gather(share, shares, at.root, group=at.group, async_op=asynchronous),
        given=share,
        result=whole,
        fill=lambda: at.sent(at.index, count),
        expected=lambda: torch.cat([at.sent(index, count) for index in range(ranks)]),
    )


def _all_gather(at: Place, count: int) -> Message:
    ranks = len(at.ranks)
    share, whole = at.empty(count), at.empty(count * ranks)
    return Message(
        lambda asynchronous: dist.all_gather_into_tensor(whole, share, group=at.group, async_op=asynchronous),
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
    """The share that ``a`` sends to ``b`` is marked as the sending of number ``a * ranks + b``."""
    ranks = len(at.ranks)
    given, result = at.empty(count * ranks), at.empty(count * ranks)
    return Message(
        lambda asynchronous: dist.all_to_all_single(result, given, group=at.group, async_op=asynchronous),
        given=given,
        result=result,
        fill=lambda: torch.cat([at.sent(at.index * ranks + other, count) for other in range(ranks)]),
        expected=lambda: torch.cat([at.sent(other * ranks + at.index, count) for other in range(ranks)]),
    )


def _barrier(at: Place, count: int) -> Message:
    return Message(lambda asynchronous: dist.barrier(group=at.group, async_op=asynchronous))


OPERATIONS: dict[str, Operation] = {
    "broadcast": Operation(_broadcast),
    "reduce": Operation(_reduce, reduces=True),
    "all_reduce": Operation(_all_reduce, reduces=True),
    "scatter": Operation(_scatter, has_shares=True),
    "gather": Operation(_gather, has_shares=True),
    "all_gather": Operation(_all_gather, has_shares=True),
    "reduce_scatter": Operation(_reduce_scatter, has_shares=True, reduces=True),
    "all_to_all": Operation(_all_to_all, has_shares=True),
    "barrier": Operation(_barrier),
}


def lacking(backend: str, device_type: str) -> list[str]:
    """The operations that a backend does not have for tensors of a device.

    By the table of backends in the documentation of ``torch.distributed``: gloo works on the host's memory, and of
    the operations on a GPU's tensors only two are documented. A barrier has no tensor.
    """
    if (backend, device_type) != ("gloo", "cuda"):
        return []
    return [name for name in OPERATIONS if name not in ("broadcast", "all_reduce", "barrier")]


def verify(message: Message, name: str, place: Place, asynchronous: bool) -> None:
    """Do it once with data that shows a mistake, and look at the result.

    Args:
        message: What is done.
        name: What it is called, with its size, for the message of the error.
        place: This rank.
        asynchronous: Whether to begin it and wait, instead of waiting inside.

    Raises:
        ArithmeticError: The result is wrong on this rank.
    """
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
        message.given.fill_(place.reduction.idle)  # which no number of reductions makes larger


def compare(result: Tensor, expected: Tensor, name: str, rank: int) -> None:
    """Nothing where the two are equal.

    Raises:
        ArithmeticError: They are not; it says what arrived, where, and what should have.
    """
    if torch.equal(result, expected):
        return
    wrong = (result != expected).nonzero().flatten()
    first = int(wrong[0])
    raise ArithmeticError(
        f"{name}: rank {rank} has {result[first].item():g} at element {first} and not {expected[first].item():g}; "
        f"{len(wrong)} of {result.numel()} elements are wrong"
    )
