"""Kernels for rows of logits: softmax normalizers, losses, and gradients in place of the logits.

A program computes a row in fp32, in blocks of its vocabulary. Maximum and sum of the exponentials take one pass
(Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867); the gradient takes a second, which finds much of the
row in the L2 cache and writes it once. The vocabulary size is a compile-time constant, as the interpreter of Triton 3.6
does not support loops up to an argument. Import this module only if Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Adjacent columns that share a maximum: 16 bytes of bf16, which a thread loads at once.
_LANE = tl.constexpr(8)

#: Maximum columns of a block: a lane for each of 512 threads, the fastest that was tried on an H200.
_MOST_COLUMNS = 2**12

#: Below all logits, but finite: the difference of two infinities is NaN.
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _statistics(row, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the maximum of a row, and the sum of its exponentials relative to it.

    Each lane keeps its own until the end: a reduction in each block would make all threads wait.
    """
    maxima = tl.full((COLUMNS // _LANE,), _LEAST, tl.float32)
    totals = tl.full((COLUMNS // _LANE,), 0.0, tl.float32)
    for first in range(0, VOCABULARY, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = tl.load(row + columns, mask=columns < VOCABULARY, other=float("-inf")).to(tl.float32)
        logits = tl.reshape(logits, (COLUMNS // _LANE, _LANE))
        larger = tl.maximum(maxima, tl.max(logits, 1))
        totals = totals * tl.exp(maxima - larger) + tl.sum(tl.exp(logits - larger[:, None]), 1)
        maxima = larger
    largest = tl.max(maxima, 0)
    return largest, tl.sum(totals * tl.exp(maxima - largest), 0)


@triton.jit
def _overwrite(row, position, largest, total, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write softmax - one_hot over a row.

    The target's entry is subtracted before the division: a softmax close to 1 has lost the digits that remain.
    """
    scale = 1.0 / total
    blocks: tl.constexpr = (VOCABULARY + COLUMNS - 1) // COLUMNS
    for block in range(0, blocks):
        columns = (blocks - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)  # backwards: the last blocks are cached
        inside = columns < VOCABULARY
        exponentials = tl.exp(tl.load(row + columns, mask=inside, other=0.0).to(tl.float32) - largest)
        gradient = tl.where(columns == position, exponentials - total, exponentials) * scale
        tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_cross_entropy(  # type: ignore[no-untyped-def]
    logits, stride, targets, losses, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr, GRADIENT: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    target = tl.load(targets + number)
    is_inside = (target >= 0) & (target < VOCABULARY)
    at_target = tl.load(row + target, mask=is_inside, other=float("nan")).to(tl.float32)
    largest, total = _statistics(row, VOCABULARY, COLUMNS)
    tl.store(losses + number, tl.log(total) - (at_target - largest))
    if GRADIENT:
        _overwrite(row, target, largest, total, VOCABULARY, COLUMNS)


@triton.jit
def _softmax_statistics(  # type: ignore[no-untyped-def]
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
def _softmax_gradient(  # type: ignore[no-untyped-def]
    logits, stride, positions, maxima, totals, VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    position, largest, total = tl.load(positions + number), tl.load(maxima + number), tl.load(totals + number)
    _overwrite(logits + number * stride, position, largest, total, VOCABULARY, COLUMNS)


# Whether a kernel changes its first argument in place, or by which option: for the bytes that it reads and writes.
_softmax_cross_entropy.rewrites, _softmax_statistics.rewrites, _softmax_gradient.rewrites = "GRADIENT", False, True


def cross_entropy_(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """Compute the loss of each row, and overwrite the logits with the gradient of the sum of losses.

    Args:
        logits: ``[rows, vocabulary]``, fp32, bf16 or fp16; rows need not be adjacent.
        targets: ``[rows]``, int64. For targets outside the vocabulary the loss is NaN.
        gradient: Whether to compute the gradient.

    Returns:
        ``[rows]``, fp32.
    """
    losses = torch.empty_like(targets, dtype=torch.float32)
    _softmax_cross_entropy[len(logits),](logits, logits.stride(0), targets, losses, GRADIENT=gradient, **_size(logits))
    return losses


def softmax_statistics(logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the maximum of each row, the sum of exp(logit - maximum), and the logit at a position.

    Args:
        logits: As for :func:`cross_entropy_`.
        positions: ``[rows]``, int64; positions outside the row give 0.

    Returns:
        Three of ``[rows]``, fp32.
    """
    maxima = torch.empty_like(positions, dtype=torch.float32)
    statistics = maxima, torch.empty_like(maxima), torch.empty_like(maxima)
    _softmax_statistics[len(logits),](logits, logits.stride(0), positions, *statistics, **_size(logits))
    return statistics


def softmax_gradient_(logits: Tensor, positions: Tensor, maxima: Tensor, totals: Tensor) -> None:
    """Overwrite logits with the gradient of the sum of losses, given the normalizers of their softmax.

    Args:
        logits: As for :func:`cross_entropy_`.
        positions: ``[rows]``, int64, of the targets; for positions outside the row nothing is subtracted.
        maxima: ``[rows]``, fp32.
        totals: ``[rows]``, fp32: sums of exp(logit - maximum).
    """
    _softmax_gradient[len(logits),](logits, logits.stride(0), positions, maxima, totals, **_size(logits))


def _size(logits: Tensor) -> dict[str, int]:
    """Return the columns of a row and of a block, with a thread for each lane of a block.

    Fused multiply-add is the default, but Triton 3.9 warns about kernels that do not say so. The many programs of a
    multiprocessor hide the latency of loads better than prefetching to shared memory would.
    """
    columns = min(max(triton.next_power_of_2(logits.shape[1]), _LANE.value), _MOST_COLUMNS)
    return {
        "VOCABULARY": logits.shape[1], "COLUMNS": columns, "num_warps": max(columns // (32 * _LANE.value), 1),
        "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip
