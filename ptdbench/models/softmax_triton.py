"""Kernels for rows of logits: what their softmax is normalized by, losses, and gradients in place of the logits.

A program computes a row, in fp32, block by block of its vocabulary. Maximum and sum of the exponentials are found in
one reading (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867); the gradient takes a second one, which
finds most of the row in the L2 cache, and writes it once. The size of the vocabulary is compiled in: the interpreter of
Triton 3.6 runs no loop up to an argument. Import this module only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns that a program has in its registers at once, at most: 16 a thread of 32 warps. Two programs of that size fill
#: a multiprocessor, and the rows of all programs of an H100 fit into half of its L2 cache.
_MOST_COLUMNS = 2**14

#: Below all logits, and finite: the difference of two infinities is no number.
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _statistics(row, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The maximum of a row, and the sum of its exponentials relative to that."""
    largest = tl.full((), _LEAST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, VOCABULARY, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = tl.load(row + columns, mask=columns < VOCABULARY, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(logits, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logits - larger), 0)
        largest = larger
    return largest, total


@triton.jit
def _overwrite(row, position, largest, total, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write softmax - one_hot over a row.

    The entry of the target is subtracted before the division: a softmax close to 1 has lost what is left of it then.
    """
    scale = 1.0 / total
    blocks: tl.constexpr = (VOCABULARY + COLUMNS - 1) // COLUMNS
    for block in range(0, blocks):
        columns = (blocks - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)  # what was read last is still in the cache
        inside = columns < VOCABULARY
        exponentials = tl.exp(tl.load(row + columns, mask=inside, other=0.0).to(tl.float32) - largest)
        gradient = tl.where(columns == position, exponentials - total, exponentials) * scale
        tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=inside)


@triton.jit
def softmax_cross_entropy(  # type: ignore[no-untyped-def] # noqa: D103
    logits, stride, targets, losses, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr, GRADIENT: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    target = tl.load(targets + number)
    is_inside = (target >= 0) & (target < VOCABULARY)
    own = tl.load(row + target, mask=is_inside, other=float("nan")).to(tl.float32)
    largest, total = _statistics(row, VOCABULARY, COLUMNS)
    tl.store(losses + number, tl.log(total) - (own - largest))
    if GRADIENT:
        _overwrite(row, target, largest, total, VOCABULARY, COLUMNS)


@triton.jit
def softmax_statistics(  # type: ignore[no-untyped-def] # noqa: D103
    logits, stride, positions, maxima, totals, owns, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    position = tl.load(positions + number)
    is_inside = (position >= 0) & (position < VOCABULARY)
    largest, total = _statistics(row, VOCABULARY, COLUMNS)
    tl.store(maxima + number, largest)
    tl.store(totals + number, total)
    tl.store(owns + number, tl.load(row + position, mask=is_inside, other=0.0).to(tl.float32))


@triton.jit
def softmax_gradient(  # type: ignore[no-untyped-def] # noqa: D103
    logits, stride, positions, maxima, totals, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    position, largest, total = tl.load(positions + number), tl.load(maxima + number), tl.load(totals + number)
    _overwrite(logits + number * stride, position, largest, total, VOCABULARY, COLUMNS)


def cross_entropy_(logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
    """Compute the loss of each row, and overwrite the logits by the gradient of their sum.

    Args:
        logits: ``[rows, vocabulary]``, fp32, bf16 or fp16; rows may be apart.
        targets: ``[rows]``, int64. The loss of one that is outside of the vocabulary is NaN.
        gradient: Whether that is wanted.

    Returns:
        ``[rows]``, fp32.
    """
    losses = _numbers(logits)
    softmax_cross_entropy[len(logits),](logits, logits.stride(0), targets, losses, GRADIENT=gradient, **_size(logits))
    return losses


def statistics(logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the maximum of each row, the sum of exp(logit - maximum), and the logit at a position.

    Args:
        logits: As for :func:`cross_entropy_`.
        positions: ``[rows]``, int64; outside of the row there is a logit of 0.

    Returns:
        Three of ``[rows]``, fp32.
    """
    found = _numbers(logits), _numbers(logits), _numbers(logits)
    softmax_statistics[len(logits),](logits, logits.stride(0), positions, *found, **_size(logits))
    return found


def gradient_(logits: Tensor, positions: Tensor, maxima: Tensor, totals: Tensor) -> None:
    """Overwrite logits by the gradient of the sum of the losses, given what their softmax is normalized by.

    Args:
        logits: As for :func:`cross_entropy_`.
        positions: ``[rows]``, int64: where the targets are; outside of a row, nothing is subtracted from it.
        maxima: ``[rows]``, fp32.
        totals: ``[rows]``, fp32: sums of exp(logit - maximum).
    """
    softmax_gradient[len(logits),](logits, logits.stride(0), positions, maxima, totals, **_size(logits))


def _numbers(logits: Tensor) -> Tensor:
    """One for each row."""
    return logits.new_empty(len(logits), dtype=torch.float32)


def _size(logits: Tensor) -> dict[str, int]:
    """The columns of a row and of a block, and as many threads as compute 16 of the latter each.

    Multiplication and addition are fused, as by default: Triton 3.9 warns of a kernel that does not say so.
    """
    columns = min(triton.next_power_of_2(logits.shape[1]), _MOST_COLUMNS)
    return {
        "VOCABULARY": logits.shape[1], "COLUMNS": columns, "num_warps": max(columns // 512, 1), "enable_fp_fusion": True
    }  # fmt: skip
