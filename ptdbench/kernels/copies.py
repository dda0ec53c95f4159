"""Narrow copies of weights to compute with, cast once a step; the weights themselves stay fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptdbench.kernels.wrapping import wrap_forward
from ptdbench.local_part import distributed_like, local_part


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
        """Bring the copies of some weights up to date, in one operation."""
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
        """Let the module see its parameter."""
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
