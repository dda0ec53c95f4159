"""Data whose journey shows: small whole numbers that every rank can compute for every other, exact in their dtype.

Each element depends on who sent it and where it stands, so that a share of the wrong rank, an exchanged order, a
contribution that is missing or counted twice all give other numbers than expected. What reductions make of them
stays within the whole numbers that the dtype holds exactly, so that any order of additions gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Dtype:
    """A number format.

    Attributes:
        torch: What torch calls it.
        exact: Every whole number from 0 to this one is in it.
        doublings: How often 1 can be doubled in it.
    """

    torch: torch.dtype
    exact: int
    doublings: int


def _whole(dtype: torch.dtype) -> Dtype:
    largest = torch.iinfo(dtype).max
    return Dtype(dtype, largest, largest.bit_length() - 1)


def _floating(dtype: torch.dtype) -> Dtype:
    numbers = torch.finfo(dtype)
    return Dtype(dtype, round(2 / numbers.eps), math.frexp(numbers.max)[1] - 1)


#: The formats that gloo and NCCL can both reduce.
DTYPES: dict[str, Dtype] = {
    "fp32": _floating(torch.float32),
    "bf16": _floating(torch.bfloat16),
    "fp16": _floating(torch.float16),
    "fp64": _floating(torch.float64),
    "int8": _whole(torch.int8),
    "uint8": _whole(torch.uint8),
    "int32": _whole(torch.int32),
    "int64": _whole(torch.int64),
}

#: A prime below 127, so that every dtype holds the numbers up to it.
_LABELS = 113


@dataclass(frozen=True)
class Reduction:
    """How the elements of several ranks become one, and which of them show that it went right.

    Attributes:
        op: What torch calls it.
        combine: The same between two tensors.
        labels: How many different numbers, from 1, the ranks contribute, from so many ranks.
        capacity: How many ranks may contribute to one element in a dtype; ``None`` for any number.
        idle: What the others contribute.
    """

    op: dist.ReduceOp.RedOpType
    combine: Callable[[Tensor, Tensor], Tensor]
    labels: Callable[[int], int]
    capacity: Callable[[Dtype], int] | None = None
    idle: int = 0


def _as_many_as_ranks(ranks: int) -> int:
    """So that each rank in turn holds the smallest and the largest."""
    return min(max(ranks, 2), _LABELS)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(dist.ReduceOp.SUM, torch.add, lambda ranks: 7, lambda dtype: dtype.exact // 7),
    "product": Reduction(dist.ReduceOp.PRODUCT, torch.mul, lambda ranks: 2, lambda dtype: dtype.doublings, idle=1),
    "min": Reduction(dist.ReduceOp.MIN, torch.minimum, _as_many_as_ranks),
    "max": Reduction(dist.ReduceOp.MAX, torch.maximum, _as_many_as_ranks),
}


def sent(source: int, count: int, dtype: Dtype, device: torch.device) -> Tensor:
    """What ``source`` sends where nothing is reduced: ``count`` numbers from 1 to 113.

    Two of the first 113 sources differ at every position; others at most positions, though not always at the first.
    """
    return _stretched(_labels(source, _LABELS, _LABELS**2) + 1, count, dtype, device)


def contributed(
    source: int, ranks: int, count: int, dtype: Dtype, reduction: Reduction, device: torch.device
) -> Tensor:
    """What rank ``source`` of ``ranks`` puts into a reduction of ``count`` elements."""
    return _stretched(_contribution(source, ranks, dtype, reduction), count, dtype, device)


def reduced(ranks: int, count: int, dtype: Dtype, reduction: Reduction, device: torch.device) -> Tensor:
    """What must come out of the reduction of all that the ranks contribute."""
    return _stretched(_reduced(ranks, dtype, reduction), count, dtype, device)


@cache
def _reduced(ranks: int, dtype: Dtype, reduction: Reduction) -> Tensor:
    """One period of the result; kept, because among many ranks it takes a while."""
    result = _contribution(0, ranks, dtype, reduction)
    for source in range(1, ranks):
        result = reduction.combine(result, _contribution(source, ranks, dtype, reduction))
    return result


def _contribution(source: int, ranks: int, dtype: Dtype, reduction: Reduction) -> Tensor:
    """One period of a rank's numbers.

    Where all ranks together would exceed the dtype, only every so many-th of them contributes to an element, and
    others do when the labels have run through: a short message then shows mistakes of some ranks only.
    """
    labels = reduction.labels(ranks)
    stride = -(-ranks // reduction.capacity(dtype)) if reduction.capacity else 1
    period = labels**2
    while period < labels * ranks:
        period *= labels
    numbers = (_labels(source, labels, period * stride) + 1).double()  # holds every power of two that is met
    if stride == 1:
        return numbers
    takes_part = (torch.arange(len(numbers)) // period + source) % stride == 0
    return torch.where(takes_part, numbers, reduction.idle)


def _labels(source: int, labels: int, length: int) -> Tensor:
    """Numbers from 0 to ``labels - 1``, so that neighbors differ and no two sources have the same sequence.

    The digits of the source, to the base ``labels``, are the coefficients by which the position, its quotient by
    ``labels``, by the square of it and so on add up.
    """
    position = torch.arange(length)
    found = position + source % labels
    rest, power = source // labels, labels
    while rest:
        found += rest % labels * (position // power)
        rest, power = rest // labels, power * labels
    return found % labels


def _stretched(period: Tensor, count: int, dtype: Dtype, device: torch.device) -> Tensor:
    """``count`` elements of a sequence that repeats."""
    short = period[:count].to(device, dtype.torch)
    return short.repeat(-(-count // len(short)))[:count]
