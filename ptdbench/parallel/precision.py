"""Precision of compute: fp32, tf32, bf16, fp16 with loss scaling, or fp8. Master weights are always fp32."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptdbench.measure import hardware, products
from ptdbench.models.protocol import wrap_forward
from ptdbench.parallel import fp8

Name = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp8_tensorwise"]

#: Dtype of activations. ``tf32``: fp32 tensors whose products and convolutions run in TF32. fp8: bf16 tensors, which
#: large linear layers cast to fp8.
DTYPES: Mapping[str, torch.dtype] = products.DTYPES | dict.fromkeys(fp8.RECIPES, torch.bfloat16)


def arithmetic(precision: Name, device_type: str) -> str:
    """Return the arithmetic of products and convolutions; for fp32 tensors, it follows ``hardware.allow_tf32``."""
    if DTYPES[precision] == torch.float32:
        return "tf32" if device_type == "cuda" and hardware.is_tf32_allowed() else "fp32"
    return "fp8" if precision in fp8.RECIPES else precision


def cast_inputs(module: nn.Module, layers: Collection[nn.Module], precision: Name) -> None:
    """Cast the inputs of a module and its layers, except targets, to ``precision``; fp32 and tf32 change nothing.

    Layers are the units of sharding and compilation. Buffers keep their dtypes;
    :class:`ptdbench.kernels.copies.Copies` or FSDP cast weights.
    """
    if DTYPES[precision] == torch.float32:
        return
    for unit in dict.fromkeys((module, *layers)):  # the module may itself be its only layer
        wrap_forward(unit, partial(_casting_inputs, dtype=DTYPES[precision]))


def _casting_inputs(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Wrap ``forward`` to cast its floating-point inputs to ``dtype``, except targets, as the loss is in fp32."""
    taken = list(inspect.signature(forward).parameters)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    @wraps(forward)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        arguments = tuple(
            value if taken[place : place + 1] == ["targets"] else tree_map(cast, value)
            for place, value in enumerate(arguments)
        )
        kept = {"targets": options.get("targets")}
        if "batch" in options:  # of a stage: inputs and targets
            kept["batch"] = (tree_map(cast, options["batch"][0]), options["batch"][1])
        options = {name: kept[name] if name in kept else tree_map(cast, value) for name, value in options.items()}
        return forward(*arguments, **options)

    return wrapped
