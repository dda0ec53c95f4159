"""Test patterns: small integers that every rank can compute for every other, exact in their dtype.

Each element depends on its source and position, so that a share of the wrong rank, a wrong order, and a contribution
that is missing or counted twice all change the result. Reduced values stay within the integers that the dtype
represents exactly, so that any order of additions gives the same bits.
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
    """A number format."""

    torch: torch.dtype  #: The torch dtype.
    exact: int  #: The largest ``n`` such that it represents all integers from 0 to ``n`` exactly.
    doublings: int  #: How often 1 can be doubled exactly.


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
    """A reduction, and the test values that show whether it is correct."""

    op: dist.ReduceOp.RedOpType  #: The torch operation.
    combine: Callable[[Tensor, Tensor], Tensor]  #: The same between two tensors.
    labels: Callable[[int], int]  #: Number of different values, from 1 on, that this many ranks contribute.
    #: How many ranks may contribute to one element in a dtype; ``None``: any number.
    capacity: Callable[[Dtype], int] | None = None
    idle: int = 0  #: The value that the other ranks contribute.


def _as_many_as_ranks(ranks: int) -> int:
    """Give each rank a label, so that each in turn holds the smallest and the largest."""
    return min(max(ranks, 2), _LABELS)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(dist.ReduceOp.SUM, torch.add, lambda ranks: 7, lambda dtype: dtype.exact // 7),
    "product": Reduction(dist.ReduceOp.PRODUCT, torch.mul, lambda ranks: 2, lambda dtype: dtype.doublings, idle=1),
    "min": Reduction(dist.ReduceOp.MIN, torch.minimum, _as_many_as_ranks),
    "max": Reduction(dist.ReduceOp.MAX, torch.maximum, _as_many_as_ranks),
}


def sent(source: int, count: int, dtype: Dtype, device: torch.device) -> Tensor:
    """Return the data that ``source`` sends in operations that do not reduce: ``count`` numbers from 1 to 113.

    Two of the first 113 sources differ at every position; others at most positions, though not always at the first.
    """
    return _stretched(_labels(source, _LABELS, _LABELS**2) + 1, count, dtype, device)


def contributed(
    source: int, ranks: int, count: int, dtype: Dtype, reduction: Reduction, device: torch.device
) -> Tensor:
    """Return the input of rank ``source`` of ``ranks`` to a reduction of ``count`` elements."""
    return _stretched(_contribution(source, ranks, dtype, reduction), count, dtype, device)


def reduced(ranks: int, count: int, dtype: Dtype, reduction: Reduction, device: torch.device) -> Tensor:
    """Return the expected result of reducing the inputs of all ranks."""
    return _stretched(_reduced(ranks, dtype, reduction), count, dtype, device)


@cache
def _reduced(ranks: int, dtype: Dtype, reduction: Reduction) -> Tensor:
    """Compute one period of the result; cached, because it is slow to compute for many ranks."""
    result = _contribution(0, ranks, dtype, reduction)
    for source in range(1, ranks):
        result = reduction.combine(result, _contribution(source, ranks, dtype, reduction))
    return result


def _contribution(source: int, ranks: int, dtype: Dtype, reduction: Reduction) -> Tensor:
    """Compute one period of a rank's numbers.

    If all ranks together would exceed the dtype, only every n-th rank contributes to an element, and the
    contributors rotate after each cycle of labels: a short message then detects errors of some ranks only.
    """
    labels = reduction.labels(ranks)
    stride = -(-ranks // reduction.capacity(dtype)) if reduction.capacity else 1
    period = labels**2
    while period < labels * ranks:
        period *= labels
    numbers = (_labels(source, labels, period * stride) + 1).double()  # holds every power of two that occurs
    if stride == 1:
        return numbers
    takes_part = (torch.arange(len(numbers)) // period + source) % stride == 0
    return torch.where(takes_part, numbers, reduction.idle)


def _labels(source: int, labels: int, length: int) -> Tensor:
    """Compute numbers from 0 to ``labels - 1``, so that neighbors differ and no two sources have the same sequence.

    The digits of the source in base ``labels`` are the coefficients of the position, its quotient by ``labels``, by
    ``labels**2``, and so on.
    """
    position = torch.arange(length)
    found = position + source % labels
    rest, power = source // labels, labels
    while rest:
        found += rest % labels * (position // power)
        rest, power = rest // labels, power * labels
    return found % labels


def _stretched(period: Tensor, count: int, dtype: Dtype, device: torch.device) -> Tensor:
    """Take ``count`` elements of a sequence that repeats."""
    short = period[:count].to(device, dtype.torch)
    return short.repeat(-(-count // len(short)))[:count]
