"""Narrow copies of weights to compute with, cast once a step; weights and their gradients stay fp32.

Weights get the gradients of their copies, cast; linear layers, embeddings and compiled norms write them in fp32, with
no rounding and no separate cast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ptdbench.kernels.linear_cross_entropy import master_of, product
from ptdbench.local_part import distributed_like, local_part
from ptdbench.models.protocol import wrap_forward


class Copies:
    """Narrow copies of the weights of a module, with which the module computes.

    Parameters stay fp32, for ``parameters()``, ``state_dict()`` and optimizers. Each forward pass of the module gets
    the copies as results of a function whose backward pass casts all their gradients at once, so that gradients are
    accumulated and reduced in fp32. Each unit gets its copies from a separate call, so that their gradients are cast as
    soon as its backward pass ends; a weight read outside its unit comes from the module's call. Batch norms keep fp32
    weights and statistics.

    Weights are cast once, at the start of a step, as they do not change during it; outside steps, in each forward pass.

    Args:
        module: The module, on the meta device or with its weights.
        units: Disjoint parts of it that run as a whole; compile or checkpoint them first, to exclude the cast.
        dtype: Dtype of the copies.
        vectors_wait: Whether the gradients of vectors, which are small, are cast at the end of the backward pass; only
            if they are not communicated before.
    """

    def __init__(
        self, module: nn.Module, units: Iterable[nn.Module], dtype: torch.dtype, *, vectors_wait: bool = False
    ) -> None:
        self._dtype = dtype
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._all = _holders(module)
        self._are_current = False
        for unit in dict.fromkeys((*units, module)):
            holders = _holders(unit)
            waiting = [holder for holder in holders if vectors_wait and holder.weight.dim() < 2]
            others = [holder for holder in holders if not vectors_wait or holder.weight.dim() >= 2]
            if groups := [group for group in (others, waiting if unit is module else []) if group]:
                wrap_forward(unit, partial(self._with_copies, groups))

    @property
    def tensors(self) -> Collection[Tensor]:
        """The copies; none before the module has run."""
        return self._copies.values()

    def begin(self, *_: Any) -> None:
        """Cast all weights for a step; they must not change before :meth:`end`."""
        self._cast(self._all)

    def end(self) -> None:
        """Withdraw the copies: modules see their parameters again, and the next forward pass casts."""
        self._are_current = False
        for holder in self._all:
            holder.restore()

    @torch.no_grad()
    def _cast(self, holders: Sequence[_Holder]) -> None:
        weights = list(dict.fromkeys(holder.weight for holder in holders))  # tied weights once
        for weight in weights:
            if weight not in self._copies:
                self._copies[weight] = torch.empty_like(weight, dtype=self._dtype)
        copies = [local_part(self._copies[weight]) for weight in weights]
        torch._foreach_copy_(copies, [local_part(weight) for weight in weights])
        self._are_current = True

    def _with_copies(self, groups: Sequence[Sequence[_Holder]], forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward`` to use copies of its weights, in groups whose gradients are cast together."""

        @wraps(forward)
        def run(*arguments: Any, **named: Any) -> Any:
            is_outermost = not self._are_current
            if is_outermost:
                self._cast([holder for group in groups for holder in group])
            for group in groups:
                weights = [holder.weight for holder in group]
                copies = _CastWeights.apply([self._copies[weight] for weight in weights], *weights)
                for holder, copy in zip(group, copies, strict=True):
                    holder.replace(copy)
            try:
                return forward(*arguments, **named)
            finally:
                if is_outermost and torch.is_grad_enabled():  # a backward pass may recompute with the copies
                    self._are_current = False
                elif is_outermost:
                    self.end()

        return run


@dataclass(frozen=True)
class _Holder:
    """A module that holds a weight under a name."""

    part: nn.Module
    name: str

    @property
    def weight(self) -> nn.Parameter:
        weight = self.part._parameters[self.name]
        assert weight is not None
        return weight

    def replace(self, copy: Tensor) -> None:
        """Let the module see a copy: instance attributes take precedence over parameters."""
        vars(self.part)[self.name] = copy
        self._list()

    def restore(self) -> None:
        if vars(self.part).pop(self.name, None) is not None:
            self._list()

    def _list(self) -> None:
        if isinstance(self.part, nn.RNNBase):  # computes with a list of its weights
            vars(self.part)["_flat_weights"] = [getattr(self.part, name) for name in self.part._flat_weights_names]


def copied_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights that :class:`Copies` copies, each once."""
    return list(dict.fromkeys(holder.weight for holder in _holders(module)))


def _holders(module: nn.Module) -> list[_Holder]:
    return [
        _Holder(part, name)
        for part in module.modules()
        if not isinstance(part, _BatchNorm)
        for name, weight in part.named_parameters(recurse=False, remove_duplicate=False)
        if weight.is_floating_point()
    ]


class _CastWeights(torch.autograd.Function):
    """Copies of weights as a function of the weights, whose gradients are cast in one operation."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        detached = tuple(copy.detach() for copy in copies)
        is_frozen = [not is_trained for is_trained in ctx.needs_input_grad[1:]]
        ctx.mark_non_differentiable(*compress(detached, is_frozen))
        return detached

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        narrow = {number: local_part(gradient) for number, gradient in enumerate(gradients) if gradient is not None}
        wide = {number: torch.empty_like(part, dtype=ctx.dtypes[number]) for number, part in narrow.items()}
        if wide:
            torch._foreach_copy_([*wide.values()], [*narrow.values()])
        # A summand stays one.
        return None, *(None if g is None else distributed_like(g, wide[number]) for number, g in enumerate(gradients))


def enable_wide_gradients(module: nn.Module, *, gathered: bool = False) -> None:
    """Let linear layers, embeddings and norms write weight gradients in the dtype of the weights.

    Modules compute with their copies (:class:`Copies`), but pass gradients directly to the
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
