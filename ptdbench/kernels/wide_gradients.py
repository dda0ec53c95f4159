"""fp32 weight gradients for modules that compute with narrow copies: no rounding, and no separate cast."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ptdbench.kernels.linear_cross_entropy import master_of, product


def enable_wide_gradients(module: nn.Module, *, gathered: bool = False) -> None:
    """Let linear layers, embeddings and norms write weight gradients in the dtype of the weights.

    Modules compute with their copies (:class:`ptdbench.kernels.copies.Copies`), but pass gradients directly to the
    weights. Linear layers and embeddings always do: products are written in fp32 if the device supports it, and rows
    are summed in fp32. Norms do if compiled, which fuses the cast; in eager mode many gradients are cast in one
    operation. A compiled norm's output is also recomputed in the backward pass, whose kernels read its input anyway:
    this saves an eighth of a GPT block's activations, for 1 % of a step's bytes.

    If FSDP has ``gathered`` the weights in the narrow dtype, only norms change, and only their recomputation is left:
    FSDP widens gradients as it copies them into its messages, and a compiled graph casts each to its weight's dtype.

    A linear layer computes all its gradients at once, so schedules that split the backward pass cannot use it.
    Subclasses, layers with a replaced ``forward`` and tensor-parallel layers stay as they are: DTensors have no
    products in fp32.
    """
    for part in module.modules():
        divided = any(isinstance(weight, DTensor) for weight in part.parameters(recurse=False))
        kind = (_NORMS if gathered else _KINDS).get(type(part))
        if kind and not divided and "forward" not in vars(part):
            part.__class__ = kind  # type: ignore[assignment]


class Linear(nn.Linear):
    """A linear layer that passes the gradients of a copy to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        master = master_of(self)
        if master is None or x.dtype != self.weight.dtype:  # a module may use autocast, which casts the weight
            return super().forward(x)
        outputs: Tensor = _Linear.apply(x, self.weight, self.bias, master, self._parameters["bias"])
        return outputs


class Embedding(nn.Embedding):
    """An embedding that does the same, unless it renormalizes its rows or has sparse gradients."""

    def forward(self, tokens: Tensor) -> Tensor:
        """``[...]``, integers, to ``[..., width]``."""
        master = master_of(self)
        if master is None or self.max_norm is not None or self.sparse:
            return super().forward(tokens)
        outputs: Tensor = _Embedding.apply(tokens, self.weight, master, self.padding_idx, self.scale_grad_by_freq)
        return outputs


class LayerNorm(nn.LayerNorm):
    """A layer norm that does the same if it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same."""
        return _norm(self, nn.LayerNorm.forward, F.layer_norm, x)


class RMSNorm(nn.RMSNorm):
    """An RMS norm that does the same if it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same."""
        return _norm(self, nn.RMSNorm.forward, F.rms_norm, x)


#: The replacement of each class of modules.
_NORMS: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
_KINDS: dict[type[nn.Module], type[nn.Module]] = _NORMS | {nn.Linear: Linear, nn.Embedding: Embedding}


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` with copies, whose gradients go to the master weights; the copies get none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, master: Tensor, master_bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = master.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, weight.shape[0])
        needs_x, _, _, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = (rows @ weight).view(x.shape) if needs_x else None
        of_weight = product(rows.T, x.reshape(-1, weight.shape[1]), ctx.dtype) if needs_weight else None
        of_bias = _sum_over_tokens(grads[0], weight, ctx.dtype) if needs_bias else None
        return of_x, None, None, of_weight, of_bias


class _Embedding(torch.autograd.Function):
    """Lookup of the rows of a copy, whose gradients are summed for the master weight."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copy: Tensor, master: Tensor, padding: int | None, scale: bool) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.options = master.dtype, len(master), -1 if padding is None else padding, scale
        return F.embedding(tokens, copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        dtype, rows, padding, scale = ctx.options
        of_master = torch.ops.aten.embedding_dense_backward(grads[0].to(dtype), tokens, rows, padding, scale)
        return None, None, of_master, None, None


class _Upcast(torch.autograd.Function):
    """Cast of a copy to the dtype of its weight; the gradient goes to the weight, not to the copy."""

    @staticmethod
    def forward(ctx: Any, copy: Tensor, weight: Tensor) -> Tensor:
        return copy.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def _norm(
    part: nn.LayerNorm | nn.RMSNorm, eager: Callable[..., Tensor], compute: Callable[..., Tensor], x: Tensor
) -> Tensor:
    """Compute a norm: if compiled with narrow weights in fp32, and again in the backward pass, else by ``eager``."""
    if not torch.compiler.is_compiling() or part.weight is None or part.weight.dtype == torch.float32:
        return eager(part, x)

    def of_narrow(x: Tensor, *weights: Tensor | None) -> Tensor:
        wide = [weight if weight is None else weight.float() for weight in weights]
        return compute(x.float(), part.normalized_shape, *wide, part.eps).to(x.dtype)

    weights: list[Tensor | None] = []  # the weight, and the bias of a layer norm
    for name, master in part._parameters.items():
        weight = getattr(part, name)
        weights.append(weight if weight is master else _Upcast.apply(weight, master))
    outputs: Tensor = checkpoint(of_narrow, x, *weights, use_reentrant=False)
    return outputs


def _sum_over_tokens(grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``[..., outputs]`` over all but the last dimension, in ``dtype``.

    After the layer that widens a block, Inductor fuses a sum over the tokens of each sequence into the kernel of the
    activation function's gradient; after the layer that narrows it, the sum is fused with the next norm's gradients.
    """
    outputs, inputs = weight.shape
    if torch.compiler.is_compiling() and outputs > inputs and grad.dim() > 2:
        grad = grad.sum(-2, dtype=dtype)
    return grad.reshape(-1, outputs).sum(0, dtype=dtype)
