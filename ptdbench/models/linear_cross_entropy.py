"""The loss of a language model's head without its whole logit tensor.

A GPT-2 vocabulary makes the logits by far the largest activation: for 8 sequences of 1024 tokens they are
1.6 GB in fp32, and the usual way keeps two or three such tensors alive. Here the projection and the cross
entropy are one operation that goes through the tokens in chunks. As the gradient of cross entropy is known
as soon as the logits are, each chunk's part of the gradients is computed at once, in the forward pass, and
its logits are dropped: the same three matrix products as the usual way, none of them twice. The idea is
that of Liger Kernel (https://arxiv.org/abs/2410.10989); this is plain PyTorch, for any device and for
torch.compile, which may keep the softmax for backward where that is smaller than the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A chunk's logits are worth bounding only where they are large: 2**24 of them are 64 MiB in fp32.
FREE_LOGITS = 2**24

# A chunk reads and writes the whole fp32 gradient of the weight once: 8 bytes an element, for 6 FLOPs per element
# and row. Against a datacenter GPU's 200 to 300 FLOPs in the time of a byte that adds a tenth at 4096 rows or
# less. A CPU does some ten, but its smaller matrix products are slower too: two chunks of 256 rows took 7 % more
# than one of 512 (two cores, fp32, GPT-2's vocabulary, width 768).
LEAST_ROWS_GPU = 4096
LEAST_ROWS_CPU = 1024


@dataclass(frozen=True)
class VocabularyShare:
    """One rank's rows of a weight whose vocabulary is cut among ranks.

    Attributes:
        first: The token of the first row.
        total: The sum of a tensor over the ranks.
        maximum: The elementwise maximum of a tensor over the ranks.
    """

    first: int
    total: Callable[[Tensor], Tensor]
    maximum: Callable[[Tensor], Tensor]


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` as a module, for a weight that may be a rank's share.

    Attributes:
        share: This rank's share of the vocabulary; ``None``: all of it.
    """

    share: VocabularyShare | None = None

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """See :func:`linear_cross_entropy`."""
        return linear_cross_entropy(hidden, weight, targets, self.share)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, share: VocabularyShare | None = None
) -> Tensor:
    """Mean cross entropy of ``hidden @ weight.T`` against ``targets``; every target counts.

    The products run in the weight's dtype; softmax and loss are computed in fp32 (fp64 for fp64), and the chunks'
    contributions to the weight's gradient are summed in it.

    Args:
        hidden: ``[..., width]``, floating point.
        weight: ``[vocabulary, width]``, floating point.
        targets: ``[...]``, int64, in ``[0, vocabulary)``.
        share: Which rows of a vocabulary that is cut among ranks ``weight`` is. No logits are gathered: the ranks
            agree on three numbers a token. The gradient of ``hidden`` is then this rank's summand of it.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64).
    """
    if not torch.is_grad_enabled():  # the function below would compute unused gradients
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), share)
    return loss


def chunk_rows(rows: int, vocabulary: int, device: torch.device) -> int:
    """Return how many of ``rows`` tokens go into one chunk, so that the chunks are of nearly equal size."""
    least = LEAST_ROWS_CPU if device.type == "cpu" else LEAST_ROWS_GPU
    most = max(FREE_LOGITS // vocabulary, least)
    chunks = -(-rows // most)
    return -(-rows // chunks)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward saves the gradients of the *sum* of the losses, and backward scales them.

    Scaling last is what makes fp16 work: the loss scale of a GradScaler arrives only in backward, and a
    softmax that was divided by the number of tokens before would by then have vanished below fp16's
    smallest number.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, share: VocabularyShare | None) -> Tensor:
        dtype = weight.dtype
        precise = torch.promote_types(dtype, torch.float32)
        rows = chunk_rows(len(hidden), len(weight), hidden.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_grad: Tensor | None = None
        hidden_grads: list[Tensor] = []
        losses: list[Tensor] = []

        for chunk, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            chunk, target = chunk.to(dtype), target.unsqueeze(1)  # noqa: PLW2901
            logits = chunk @ weight.T
            log_likelihood, softmax = (_of_all if share is None else partial(_of_share, share))(logits, target, precise)
            losses.append(-log_likelihood.sum())
            if not (needs_hidden or needs_weight):
                continue
            grad = softmax()
            if needs_hidden:
                hidden_grads.append(grad @ weight)
            if needs_weight:
                weight_grad = _add_product(weight_grad, grad.T, chunk, precise)

        ctx.tokens = len(hidden)
        ctx.save_for_backward(torch.cat(hidden_grads) if needs_hidden else None, weight_grad)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, weight.dtype
        return torch.stack(losses).sum() / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0] / ctx.tokens
        if hidden_grad is not None:
            hidden_grad = (hidden_grad.to(ctx.hidden_dtype) * scale).to(ctx.hidden_dtype)
        if weight_grad is not None:
            # In place, as this is the largest tensor here, unless the graph is kept for a second backward pass: a
            # pipeline of zero bubble computes the gradient of the weight apart, in the second.
            scaled = weight_grad * scale if _keeps_graph() else weight_grad.mul_(scale)
            weight_grad = scaled.to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None


def _of_all(logits: Tensor, target: Tensor, precise: torch.dtype) -> tuple[Tensor, Callable[[], Tensor]]:
    """The log likelihoods of the targets, ``[rows, 1]``, and what computes the gradient of their losses.

    d loss / d logits = softmax - one_hot. The entry of the target is taken from the precise value: a softmax close to 1
    has lost in bf16 the very digits that remain after subtracting 1.
    """
    likelihood = F.log_softmax(logits, dim=1, dtype=precise).gather(1, target)
    return likelihood, lambda: F.softmax(logits, dim=1).scatter_(1, target, torch.expm1(likelihood).to(logits.dtype))


def _of_share(
    share: VocabularyShare, logits: Tensor, target: Tensor, precise: torch.dtype
) -> tuple[Tensor, Callable[[], Tensor]]:
    """:func:`_of_all` for the logits of some tokens: normalized over all ranks, with the gradient of these logits."""
    largest = share.maximum(logits.amax(1, keepdim=True).to(precise))
    exponentials = (logits.to(precise) - largest).exp_()
    normalizer = share.total(exponentials.sum(1, keepdim=True))
    position = target - share.first
    is_here = (position >= 0) & (position < logits.shape[1])
    position = position.where(is_here, 0)
    own = logits.gather(1, position).to(precise).where(is_here, 0)
    likelihood = share.total(own) - largest - normalizer.log()

    def gradient() -> Tensor:
        softmax = exponentials.div_(normalizer).to(logits.dtype)
        at_target = torch.expm1(likelihood).to(logits.dtype).where(is_here, softmax.gather(1, position))
        return softmax.scatter_(1, position, at_target)

    return likelihood, gradient


def _keeps_graph() -> bool:
    """Whether the backward pass that is running keeps its graph; one that is being compiled does not."""
    return not torch.compiler.is_compiling() and torch._C._autograd._get_current_graph_task_keep_graph()


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + left @ right`` in ``dtype``, in place where there is a total already."""
    if left.dtype != dtype and has_wide_products(left.device):
        if total is None or torch.compiler.is_compiling():  # neither torch 2.11 nor 2.15 compiles such an addmm
            product = torch.mm(left, right, out_dtype=dtype)
            return product if total is None else total.add_(product)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    if total is None:
        return (left @ right).to(dtype)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def has_wide_products(device: torch.device) -> bool:
    """Return whether products of 16-bit matrices can be written in fp32: not rounded, and summed in the same pass.

    torch has them for CUDA alone.
    """
    return device.type == "cuda" and torch.version.hip is None
