"""The collective operations of ``torch.distributed``, each prepared at one size for repeated calls.

The size of a message is the whole: if every rank holds a share (``scatter``, ``gather``, ``all_gather``,
``reduce_scatter``, ``all_to_all``), the sum of all shares, as in nccl-tests.

Messages are small integers that every rank can compute for every other: each element depends on its source and
position, and sums are exact in the dtype, so that any order of additions gives the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.virtual.machine import is_virtual

#: The formats that gloo and NCCL can both reduce.
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}


def largest_exact(dtype: torch.dtype) -> int:
    """Return the largest ``n`` such that all integers from 0 to ``n`` are represented exactly."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


#: Sources send numbers from 1 to this: a prime below 127, so that every dtype represents them.
_LABELS = 113

#: Ranks contribute numbers from 1 to this to a sum.
_SUMMANDS = 13


def sent(source: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the data that ``source`` sends in operations that do not reduce: ``count`` numbers from 1 to 113.

    Any two of the first 113 sources differ at every position.
    """
    return _stretched((torch.arange(_LABELS) + source) % _LABELS + 1, count, dtype, device)


@cache
def _summed(ranks: int, dtype: torch.dtype) -> Tensor:
    """Compute one period of the sum; cached, as it is slow for many ranks."""
    return sum((_contribution(source, ranks, dtype) for source in range(1, ranks)), _contribution(0, ranks, dtype))


def _contribution(source: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Compute one period of a rank's numbers; any two of 13 ranks in a row differ.

    If all ranks together would exceed the dtype, only every n-th rank contributes to an element, and contributors
    rotate after each cycle of numbers: a short message then detects errors of some ranks only.
    """
    stride = -(-ranks // (largest_exact(dtype) // _SUMMANDS))
    position = torch.arange(_SUMMANDS * stride)
    takes_part = (position // _SUMMANDS + source) % stride == 0
    return torch.where(takes_part, (position + source) % _SUMMANDS + 1, 0)


def _stretched(period: Tensor, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    short = period[:count].to(device, dtype)
    return short.repeat(-(-count // len(short)))[:count]


@dataclass(frozen=True)
class GroupRank:
    """One rank of a group."""

    group: dist.ProcessGroup | None  #: The process group; ``None`` for all ranks of the run.
    ranks: Sequence[int]  #: Global ranks of the group; the first one is the root of rooted operations.
    index: int  #: This rank's index in the group.
    device: torch.device  #: This rank's device.
    dtype: torch.dtype  #: Dtype of the message.

    @property
    def root(self) -> int:
        """The global rank of the root."""
        return self.ranks[0]

    def empty(self, count: int) -> Tensor:
        """Return a tensor of ``count`` zeros."""
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def sent(self, source: int, count: int) -> Tensor:
        """Return the pattern that ``source`` sends (:func:`ptdbench.measure.operations.sent`)."""
        return sent(source, count, self.dtype, self.device)

    def contributed(self, count: int) -> Tensor:
        """Return this rank's input to a sum of ``count`` elements."""
        return _stretched(_contribution(self.index, len(self.ranks), self.dtype), count, self.dtype, self.device)

    def summed(self, count: int) -> Tensor:
        """Return the expected result of the sum."""
        return _stretched(_summed(len(self.ranks), self.dtype), count, self.dtype, self.device)


@dataclass(frozen=True)
class Message:
    """One operation at one size, on one rank."""

    call: Callable[[], dist.Work | None]  #: Runs the operation.
    input: Tensor | None = None  #: This rank's input; ``None`` if it has none.
    result: Tensor | None = None  #: This rank's result, possibly ``input`` itself; ``None`` if it has none.
    fill: Callable[[], Tensor] | None = None  #: Content of ``input`` before a call to verify.
    expected: Callable[[], Tensor] | None = None  #: Content of ``result`` after it.


@dataclass(frozen=True)
class Operation:
    """A collective operation."""

    prepare: Callable[[GroupRank, int], Message]  #: Creates a rank's message, given its elements, per share if any.
    has_shares: bool = False  #: Whether each rank holds a share of the whole.
    reduces: bool = False  #: Whether it sums.
    #: Bus bandwidth, the rate of the slowest link, over bytes per second, for a number of ranks, as nccl-tests defines
    #: it (``doc/PERFORMANCE.md``, ``src/gather.cu`` and ``src/scatter.cu``); ``None`` if no data move.
    bus_factor: Callable[[int], float] | None = lambda ranks: 1.0

    def count(self, size: int, ranks: int, item_bytes: int) -> int:
        """Return the elements, at least one, of a message of about ``size`` bytes, per share if there are shares."""
        return max(1, size // (item_bytes * (ranks if self.has_shares else 1)))

    def bytes(self, count: int, ranks: int, item_bytes: int) -> int:
        """Return the bytes of the whole message with the ``count`` of :meth:`count`."""
        return count * item_bytes * (ranks if self.has_shares else 1)


# Since torch 2.14 the older names warn.
_all_gather_tensor: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _broadcast(rank: GroupRank, count: int) -> Message:
    data = rank.empty(count)
    return Message(
        partial(dist.broadcast, data, rank.root, rank.group),
        input=data,
        result=data,
        fill=lambda: rank.sent(0, count) if rank.index == 0 else rank.empty(count),
        expected=lambda: rank.sent(0, count),
    )


def _reduce(rank: GroupRank, count: int, to_all: bool = False) -> Message:
    data = rank.empty(count)
    reduce = dist.all_reduce if to_all else partial(dist.reduce, dst=rank.root)
    return Message(
        partial(reduce, data, group=rank.group),
        input=data,
        result=data if to_all or rank.index == 0 else None,
        fill=lambda: rank.contributed(count),
        expected=lambda: rank.summed(count),
    )


def _scatter(rank: GroupRank, count: int) -> Message:
    ranks = len(rank.ranks)
    share = rank.empty(count)
    whole = rank.empty(count * ranks) if rank.index == 0 else None
    shares = None if whole is None else list(whole.chunk(ranks))
    return Message(
        partial(dist.scatter, share, shares, rank.root, rank.group),
        input=whole,
        result=share,
        fill=lambda: torch.cat([rank.sent(index, count) for index in range(ranks)]),
        expected=lambda: rank.sent(rank.index, count),
    )


def _gather(rank: GroupRank, count: int, to_all: bool = False) -> Message:
    ranks = len(rank.ranks)
    share = rank.empty(count)
    whole = rank.empty(count * ranks) if to_all or rank.index == 0 else None
    shares = None if whole is None else list(whole.chunk(ranks))
    gather = partial(_all_gather_tensor, whole) if to_all else partial(dist.gather, gather_list=shares, dst=rank.root)
    return Message(
        partial(gather, share, group=rank.group),
        input=share,
        result=whole,
        fill=lambda: rank.sent(rank.index, count),
        expected=lambda: torch.cat([rank.sent(index, count) for index in range(ranks)]),
    )


def _reduce_scatter(rank: GroupRank, count: int) -> Message:
    ranks = len(rank.ranks)
    whole, share = rank.empty(count * ranks), rank.empty(count)
    return Message(
        partial(_reduce_scatter_tensor, share, whole, group=rank.group),
        input=whole,
        result=share,
        fill=lambda: rank.contributed(count * ranks),
        expected=lambda: rank.summed(count * ranks).chunk(ranks)[rank.index],
    )


def _all_to_all(rank: GroupRank, count: int) -> Message:
    """Send from ``a`` to ``b`` the pattern of source ``a * ranks + b``."""
    ranks = len(rank.ranks)
    outgoing, incoming = rank.empty(count * ranks), rank.empty(count * ranks)
    return Message(
        partial(dist.all_to_all_single, incoming, outgoing, group=rank.group),
        input=outgoing,
        result=incoming,
        fill=lambda: torch.cat([rank.sent(rank.index * ranks + other, count) for other in range(ranks)]),
        expected=lambda: torch.cat([rank.sent(other * ranks + rank.index, count) for other in range(ranks)]),
    )


_with_shares = partial(Operation, has_shares=True, bus_factor=lambda ranks: (ranks - 1) / ranks)

OPERATIONS: dict[str, Operation] = {
    "broadcast": Operation(_broadcast),
    "reduce": Operation(_reduce, reduces=True),
    "all_reduce": Operation(
        partial(_reduce, to_all=True), reduces=True, bus_factor=lambda ranks: 2 * (ranks - 1) / ranks
    ),
    "scatter": _with_shares(_scatter),
    "gather": _with_shares(_gather),
    "all_gather": _with_shares(partial(_gather, to_all=True)),
    "reduce_scatter": _with_shares(_reduce_scatter, reduces=True),
    "all_to_all": _with_shares(_all_to_all),
    "barrier": Operation(lambda rank, _: Message(partial(dist.barrier, rank.group)), bus_factor=None),
}


def unsupported(backend: str, device_type: str) -> list[str]:
    """Return the operations that a backend does not support for a device, by the table of ``torch.distributed``.

    gloo supports only two operations on GPU tensors, and the barrier, which has no tensor.
    """
    if (backend, device_type) != ("gloo", "cuda"):
        return []
    return [name for name in OPERATIONS if name not in ("broadcast", "all_reduce", "barrier")]


def verify(message: Message, name: str, place: GroupRank) -> None:
    """Run an operation once on a test pattern; raise ArithmeticError with its name if the result is wrong."""
    if message.result is not None:
        message.result.zero_()
    if message.input is not None and message.fill:
        message.input.copy_(message.fill())
    message.call()
    if message.result is not None and message.expected:
        compare(message.result, message.expected(), name, place.ranks[place.index])
    if message.input is not None:
        message.input.zero_()  # unchanged by any number of sums


def compare(result: Tensor, expected: Tensor, name: str, rank: int) -> None:
    """Raise ArithmeticError with the first wrong element, if any; a virtual GPU's data is not compared."""
    if (result.is_cuda and is_virtual(torch.cuda.get_device_name(result.device))) or torch.equal(result, expected):
        return
    wrong = (result != expected).nonzero().flatten()
    first = int(wrong[0])
    raise ArithmeticError(
        f"{name}: rank {rank} has {result[first].item():g} at element {first} instead of {expected[first].item():g}; "
        f"{len(wrong)} of {result.numel()} elements are wrong"
    )
