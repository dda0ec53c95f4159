"""The loss of a language model's head without its whole logit tensor.

With GPT-2's vocabulary the logits are by far the largest activation: 1.6 GB in fp32 for 8 sequences of 1024 tokens, and
the usual way keeps two or three such tensors alive. Here the projection and the cross entropy are one operation that
processes the tokens in chunks. As the gradient of cross entropy is known as soon as the logits are, each chunk's part
of the gradients is computed in the forward pass, and its logits are freed: the same three matrix products as the usual
way, none of them twice. This is the idea of Liger Kernel (https://arxiv.org/abs/2410.10989), for any device and for
torch.compile, which may keep the softmax for the backward pass if it is smaller than the weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ptdbench.kernels.softmax import VocabularyShare, cross_entropy_
from ptdbench.models.decoder import Head

# Each chunk reads and writes the whole fp32 gradient of the weight once, 8 bytes per element, for 6 FLOPs per element
# and row. A datacenter GPU computes 200 to 300 FLOPs in the time of a byte: with 4096 rows this traffic takes a tenth
# of the time of the products, with 16384 a fortieth. So chunks are as large as possible: their logits take a fraction
# of the GPU's total memory, the same on all ranks and in all steps, regardless of free memory.
LOGITS_GPU = 0.02

# On a CPU, bounding a chunk's logits pays off only if they are large: 2**24 are 64 MiB in fp32. A CPU has some ten
# FLOPs per byte, but smaller matrix products are slower too: two chunks of 256 rows took 7 % longer than one of 512
# (two cores, fp32, GPT-2's vocabulary, width 768).
LOGITS_CPU = 2**24

LEAST_ROWS = 1024


def fuse_heads(module: nn.Module) -> None:
    """Replace the losses of language models' heads in place; call it before any transform."""
    for part in module.modules():
        if type(part) is Head:
            part.__class__ = FusedHead
            part.cross_entropy = LinearCrossEntropy()


class FusedHead(Head):
    """A head whose projection and loss are one operation, without the whole logits."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` to logits ``[batch, length, vocabulary]``, or the mean loss in fp32."""
        if targets is None:
            return super().forward(x)
        # If a narrow copy replaces the weight, the weight itself gets the gradient, summed in fp32.
        loss: Tensor = self.cross_entropy(self.norm(x), self.projection.weight, targets, master_of(self.projection))
        return loss


class LinearCrossEntropy(nn.Module):
    """Mean cross entropy of ``hidden @ weight.T`` against targets; every target counts.

    The products run in the weight's dtype; softmax, loss, and the sum of the chunks' contributions to the weight's
    gradient use fp32 (fp64 for fp64).
    """

    #: This rank's rows of a vocabulary that is split over ranks; ``None``: all rows. No logits are gathered: the ranks
    #: reduce three numbers per token. The gradient of ``hidden`` is then only this rank's summand.
    share: VocabularyShare | None = None

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, original: Tensor | None = None) -> Tensor:
        """Compute the loss.

        Args:
            hidden: ``[..., width]``, floating point.
            weight: ``[vocabulary, width]``, floating point.
            targets: ``[...]``, int64, in ``[0, vocabulary)``.
            original: The tensor that ``weight`` is a copy of, if any: it gets the gradient, in its own dtype.

        Returns:
            A scalar in fp32 (fp64 for fp64).
        """
        original = weight if original is None else original
        if not torch.is_grad_enabled():  # the function below would compute unused gradients
            hidden, original = hidden.detach(), original.detach()
        rows = hidden.flatten(0, -2)
        return _LinearCrossEntropy.apply(rows, weight.detach(), original, targets.flatten(), self.share)


def chunk_rows(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the rows per chunk, so that chunks of ``rows`` tokens are of nearly equal size."""
    if device.type == "cuda":
        most = most_rows(vocabulary, dtype, torch.cuda.get_device_properties(device).total_memory)
    else:
        most = max(LOGITS_CPU // vocabulary, LEAST_ROWS)
    chunks = -(-rows // most)
    return -(-rows // chunks)


def most_rows(vocabulary: int, dtype: torch.dtype, memory: int) -> int:
    """Return the most rows of a chunk on a GPU of ``memory`` bytes."""
    logits = int(LOGITS_GPU * (memory >> 30 << 30)) // dtype.itemsize  # GPUs of one model differ by some MiB
    return max(logits // vocabulary, LEAST_ROWS)


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward pass saves the gradients of the *sum* of the losses, and the backward pass scales them.

    fp16 requires scaling last: a GradScaler's loss scale arrives only in the backward pass, and a softmax divided by
    the number of tokens before that would underflow.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, original: Tensor, targets: Tensor, share: VocabularyShare | None
    ) -> Tensor:
        dtype = weight.dtype
        precise = torch.promote_types(dtype, torch.float32)
        rows = chunk_rows(len(hidden), len(weight), dtype, hidden.device)
        needs_hidden, _, needs_weight = ctx.needs_input_grad[:3]
        weight_grad: Tensor | None = None
        hidden_grads: list[Tensor] = []
        losses: list[Tensor] = []

        for chunk, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            chunk = chunk.to(dtype)  # noqa: PLW2901
            loss, grad = cross_entropy_(chunk @ weight.T, target, share, gradient=needs_hidden or needs_weight)
            losses.append(loss.sum())
            if needs_hidden:
                hidden_grads.append(grad @ weight)
            if needs_weight:
                weight_grad = _add_product(weight_grad, grad, chunk, precise)
            del grad  # before the next chunk takes as much

        ctx.tokens = len(hidden)
        # A single chunk's gradient is not copied.
        hidden_grad = torch.cat(hidden_grads) if len(hidden_grads) > 1 else next(iter(hidden_grads), None)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, original.dtype
        return torch.stack(losses).sum() / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0] / ctx.tokens
        if hidden_grad is not None:
            hidden_grad = (hidden_grad.to(ctx.hidden_dtype) * scale).to(ctx.hidden_dtype)
        if weight_grad is not None:
            # In place, as this is the largest tensor here, unless the graph is kept for a second backward pass, as in a
            # zero-bubble pipeline.
            scaled = weight_grad * scale if _keeps_graph() else weight_grad.mul_(scale)
            weight_grad = scaled.to(ctx.weight_dtype)
        return hidden_grad, None, weight_grad, None, None


def _keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph; a compiled one does not."""
    return not torch.compiler.is_compiling() and torch._C._autograd._get_current_graph_task_keep_graph()


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right`` in ``dtype``: written directly if the device supports it, else rounded first."""
    if left.dtype != dtype and has_wide_products(left.device):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _add_product(total: Tensor | None, grad: Tensor, chunk: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total + grad.T @ chunk`` in ``dtype``, in place if there is a total already."""
    if total is None:
        return product(grad.T, chunk, dtype)
    if has_wide_products(grad.device):
        torch.ops.ptdbench.add_product_(total, grad, chunk)
        return total
    return total.addmm_(grad.T, chunk) if grad.dtype == dtype else total.add_(grad.T @ chunk)


def master_of(part: nn.Module) -> nn.Parameter | None:
    """Return the weight of a module that computes with a copy in another dtype, or ``None`` if there is no copy."""
    weight = part._parameters.get("weight")
    return weight if weight is not None and part.weight.dtype != weight.dtype else None


def has_wide_products(device: torch.device) -> bool:
    """Return whether products of 16-bit matrices can be written or accumulated in fp32; torch can on CUDA only."""
    return device.type == "cuda" and torch.version.hip is None
