"""Precision of the arithmetic: fp32, tf32, bf16, fp16 with loss scaling, or fp8. Master weights are always fp32."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ptdbench.measure import products, tf32
from ptdbench.parallel.activations import wrap_forward

Name = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

#: Dtype of activations. ``tf32``: fp32 tensors whose products and convolutions run in TF32. ``fp8``: bf16 tensors that
#: large linear layers cast once more.
DTYPES: Mapping[str, torch.dtype] = products.DTYPES | {"fp8": torch.bfloat16}


def arithmetic(precision: Name, device_type: str) -> str:
    """The arithmetic of products and convolutions; that of fp32 tensors as torch is set: see :func:`tf32.allow`."""
    if DTYPES[precision] == torch.float32:
        return "tf32" if device_type == "cuda" and tf32.is_allowed() else "fp32"
    return precision


def narrow(module: nn.Module, layers: Collection[nn.Module], precision: Name, *, weights: bool) -> None:
    """Let a module compute in ``precision``, the same way under every layout; fp32 and tf32 leave it as it is.

    Its parameters stay fp32. Each use of one in a forward pass is a differentiable cast, so that its gradient is
    accumulated and reduced in fp32. What enters the module or one of its layers is cast too, except targets. Batch
    norms keep fp32 weights and statistics, and buffers their dtypes.

    Args:
        module: The model, or a stage of it.
        layers: Its units of sharding and compilation.
        precision: Dtype of the arithmetic.
        weights: Whether weights are cast here; FSDP gathers them in the narrow dtype already.
    """
    dtype = DTYPES[precision]
    if dtype == torch.float32:
        return
    for unit in dict.fromkeys((module, *layers)):  # a module of one layer may be it
        wrap_forward(unit, partial(_casting_inputs, dtype=dtype))
    for part in module.modules() if weights else ():
        names = tuple(name for name, weight in part.named_parameters(recurse=False) if weight.is_floating_point())
        if not isinstance(part, _BatchNorm):
            cast_on_read(part, names, _cast_to(dtype))


def _casting_inputs(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """``forward`` with its floating-point tensors cast to ``dtype``; targets keep theirs, as a loss is in fp32."""
    taken = list(inspect.signature(forward).parameters)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    @wraps(forward)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        arguments = tuple(
            value if taken[place : place + 1] == ["targets"] else tree_map(cast, value)
            for place, value in enumerate(arguments)
        )
        options = {name: value if name == "targets" else tree_map(cast, value) for name, value in options.items()}
        return forward(*arguments, **options)

    return wrapped


@cache
def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The cast, one function for each dtype, so that equal modules get one class."""
    return lambda weight: weight.to(dtype)


class AgreedGradScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks skip a step together.

    An overflow may show on one rank only: in one stage of a pipeline, or in one shard of a weight. A rank that
    skipped alone would leave the others with different weights and a different scale.
    """

    def __init__(self, device: str, enabled: bool) -> None:
        super().__init__(device, enabled=enabled)
        if enabled:  # torch sets this up when a loss is scaled, which never happens on a pipeline's first stages
            self._lazy_init_scale_growth_tracker(torch.device(device))

    def _unscale_grads_(self, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*arguments, **options)
        for overflow in found.values():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return found


def cast_on_read(module: nn.Module, names: tuple[str, ...], how: Callable[[Tensor], Tensor]) -> None:
    """Let ``module`` see ``how(parameter)`` where it reads one of its own parameters ``names``.

    ``parameters()``, ``state_dict()`` and optimizers see the parameters themselves. The compiler traces ``how`` with
    the rest of a layer. Applied twice, the second one gets what the first one returns.

    Args:
        module: Its class becomes a subclass whose attributes ``names`` are properties, as in torchtitan's SimpleFSDP.
        names: Of its own parameters, not of those of its submodules.
        how: A differentiable function; hashable.
    """
    if names:
        module.__class__ = _reading(type(module), names, how)  # type: ignore[arg-type]


@cache
def _reading(kind: type[nn.Module], names: tuple[str, ...], how: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """The subclass; equal modules get one, so that they share a compiled graph."""

    def attribute(name: str) -> property:
        before = getattr(kind, name, None)
        if isinstance(before, property) and before.fget is not None:
            read = before.fget
            return property(lambda self: how(read(self)))
        return property(lambda self: how(self._parameters[name]))

    attributes: dict[str, Any] = {name: attribute(name) for name in names}
    if issubclass(kind, nn.RNNBase):  # computes with a list of its weights
        ordered = property(lambda self: [getattr(self, name) for name in self._flat_weights_names], lambda *_: None)
        attributes["_flat_weights"] = ordered
    return type(kind.__name__, (kind,), {**attributes, "__module__": kind.__module__, "__doc__": kind.__doc__})
