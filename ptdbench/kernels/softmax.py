"""Losses of rows of logits and their gradients: by torch's operations, or on CUDA by kernels that overwrite the logits.

The kernels are registered as torch operations, which eager and compiled code share.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdbench.problems import first_line


@dataclass(frozen=True)
class VocabularyShare:
    """One rank's rows of a weight whose vocabulary is split over ranks."""

    first: int  #: The token of the first row.
    total: Callable[[Tensor], Tensor]  #: The sum of a tensor over the ranks.
    maximum: Callable[[Tensor], Tensor]  #: The elementwise maximum of a tensor over the ranks.


def cross_entropy_(
    logits: Tensor, targets: Tensor, share: VocabularyShare | None, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row in fp32 (fp64 for fp64), and the gradient of their sum.

    d loss / d logits = softmax - one_hot. The target's entry is computed at higher precision: a bf16 softmax close to 1
    has lost the digits that remain after subtracting 1.

    Args:
        logits: ``[rows, vocabulary]``, or this rank's share of the columns; may be overwritten.
        targets: ``[rows]``, int64.
        share: Which columns these are, if not all.
        gradient: Whether to compute the gradient.

    Returns:
        The losses, ``[rows]``, and the gradient, in shape and dtype of the logits; undefined without ``gradient``.
    """
    if has_kernels(logits.device) and logits.dtype != torch.float64:
        if share is None:
            return torch.ops.ptdbench.cross_entropy_(logits, targets, gradient), logits
        return _of_share_in_place(share, logits, targets, gradient=gradient), logits
    precise = torch.promote_types(logits.dtype, torch.float32)
    target = targets.unsqueeze(1)
    likelihood, softmax = (
        _of_all(logits, target, precise) if share is None else _of_share(share, logits, target, precise)
    )
    return -likelihood.squeeze(1), softmax() if gradient else logits


def has_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels run on a device; on ROCm they are untested, and not used."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_properties(device).major < 8:  # Triton requires 8
        return False
    return torch.compiler.is_compiling() or _has_triton(device)  # compilation needs Triton anyway


@cache
def _has_triton(device: torch.device) -> bool:
    """Whether a kernel runs; Triton needs a C compiler, for example."""
    try:
        row = torch.zeros(1, 16, device=device)
        torch.ops.ptdbench.cross_entropy_(row, row.new_zeros(1, dtype=torch.int64), True)
    except Exception as error:  # a compiler, linker or driver may raise anything
        reason = first_line(error)
        warnings.warn(f"computing the loss without its Triton kernel, which does not run here: {reason}", stacklevel=2)
        return False
    return True


def _of_all(logits: Tensor, target: Tensor, precise: torch.dtype) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the log likelihoods of the targets, ``[rows, 1]``, and a function for the gradient of the losses."""
    likelihoods = F.log_softmax(logits, dim=1, dtype=precise)
    likelihood = likelihoods.gather(1, target)

    def gradient() -> Tensor:
        is_precise = logits.dtype == precise
        softmax = F.softmax(logits, dim=1) if is_precise else likelihoods.exp_().to(logits.dtype)
        return softmax.scatter_(1, target, torch.expm1(likelihood).to(logits.dtype))

    return likelihood, gradient


def _of_share(
    share: VocabularyShare, logits: Tensor, target: Tensor, precise: torch.dtype
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Like :func:`_of_all` for the logits of some tokens: normalized over all ranks, with gradients of these logits."""
    largest = share.maximum(logits.amax(1, keepdim=True).to(precise))
    exponentials = (logits.to(precise) - largest).exp_()
    normalizer = share.total(exponentials.sum(1, keepdim=True))
    position = target - share.first
    is_here = (position >= 0) & (position < logits.shape[1])
    position = position.where(is_here, 0)
    at_target_here = logits.gather(1, position).to(precise).where(is_here, 0)
    likelihood = share.total(at_target_here) - largest - normalizer.log()

    def gradient() -> Tensor:
        softmax = exponentials.div_(normalizer).to(logits.dtype)
        at_target = torch.expm1(likelihood).to(logits.dtype).where(is_here, softmax.gather(1, position))
        return softmax.scatter_(1, position, at_target)

    return likelihood, gradient


def _of_share_in_place(share: VocabularyShare, logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
    """Return the losses of :func:`_of_share`, ``[rows]``, and overwrite the logits with the gradient."""
    positions = targets - share.first
    maxima, totals, at_targets = torch.ops.ptdbench.softmax_statistics(logits, positions)
    largest = share.maximum(maxima)
    normalizer = share.total(totals * (maxima - largest).exp_())
    losses = normalizer.log() - (share.total(at_targets) - largest)
    if gradient:
        torch.ops.ptdbench.softmax_gradient_(logits, positions, largest, normalizer)
    return losses


_OPERATIONS = torch.library.Library("ptdbench", "FRAGMENT")


def _operation(schema: str, like: Callable[..., Any], run: Callable[..., Any] | None = None) -> None:
    """Register an operation: ``run``, or the kernel of its name; ``like``: its fake implementation.

    The first call of :func:`torch.library.custom_op` would import the compiler, which takes seconds.
    """
    name = schema.partition("(")[0]
    _OPERATIONS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _OPERATIONS.impl(name, run or partial(_by_kernel, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ptdbench::{name}", like, lib=_OPERATIONS)


def _by_kernel(name: str, *arguments: Any) -> Any:
    from ptdbench.kernels import softmax_triton  # needs Triton

    return getattr(softmax_triton, name)(*arguments)


def _numbers(logits: Tensor, *_: Any) -> Tensor:
    """Return an uninitialized number for each row."""
    return logits.new_empty(len(logits), dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to a total in its dtype, in one pass; compiled graphs have no such operation."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)


_operation("cross_entropy_(Tensor(a!) logits, Tensor targets, bool gradient) -> Tensor", _numbers)
_operation(
    "softmax_statistics(Tensor logits, Tensor positions) -> (Tensor, Tensor, Tensor)",
    lambda logits, _: (_numbers(logits), _numbers(logits), _numbers(logits)),
)
_operation(
    "softmax_gradient_(Tensor(a!) logits, Tensor positions, Tensor maxima, Tensor totals) -> ()", lambda *_: None
)
_operation("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()", lambda *_: None, _add_product)
