"""Precision of compute: fp32, tf32, bf16, fp16 with loss scaling, or fp8 through torchao.

Master weights are always fp32. In fp8 run the three matrix products of large linear layers.
"""

import importlib.util
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ptdbench.local_part import local_part
from ptdbench.measure import hardware, products
from ptdbench.models.protocol import wrap_forward

Name = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp8_tensorwise"]

#: torchao's recipe for each precision in fp8. ``rowwise``: a scale for each row of a factor. ``tensorwise``: one scale
#: per factor, which rounds more coarsely, but uses cuBLAS's faster kernels and lets FSDP gather weights in fp8.
FP8_RECIPES: Mapping[str, str] = {"fp8": "rowwise", "fp8_tensorwise": "tensorwise"}

#: Dtype of activations. ``tf32``: fp32 tensors whose products and convolutions run in TF32. fp8: bf16 tensors, which
#: large linear layers cast to fp8.
DTYPES: Mapping[str, torch.dtype] = products.DTYPES | dict.fromkeys(FP8_RECIPES, torch.bfloat16)

#: The smallest side of a weight to convert to fp8: only a large product repays the cast, which reads both factors.
FP8_SMALLEST = 512
#: fp8 kernels need both sides to be multiples of this.
FP8_MULTIPLE = 16


def arithmetic(precision: Name, device_type: str) -> str:
    """Return the arithmetic of products and convolutions; for fp32 tensors, it follows ``hardware.allow_tf32``."""
    if DTYPES[precision] == torch.float32:
        return "tf32" if device_type == "cuda" and hardware.is_tf32_allowed() else "fp32"
    return "fp8" if precision in FP8_RECIPES else precision


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


def has_torchao() -> bool:
    """Return whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def suits_fp8(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose sides are large and divisible enough for fp8."""
    if type(module) is not nn.Linear:  # a subclass may compute something else
        return False
    sides = (module.in_features, module.out_features)
    return all(side >= FP8_SMALLEST and side % FP8_MULTIPLE == 0 for side in sides)


def fp8_layers(layers: Sequence[nn.Module], precision: str, *, sharded: bool) -> list[nn.Linear]:
    """Return the modules of ``layers`` that compute in fp8 under this precision, if it is one of :data:`FP8_RECIPES`.

    Layers themselves are excluded, as they have no parent to replace them in; so are modules with tied weights if FSDP
    gathers weights in fp8, as conversion would untie them.
    """
    inside = dict.fromkeys(module for layer in layers for module in layer.modules()) if precision in FP8_RECIPES else {}
    holders = Counter[Tensor](weight for module in inside for weight in module.parameters(recurse=False))
    gathered = gathers_fp8(precision, sharded=sharded)
    return [
        module
        for module in inside
        if isinstance(module, nn.Linear) and suits_fp8(module) and module not in layers
        if not (gathered and holders[module.weight] > 1)
    ]


def gathers_fp8(precision: object, *, sharded: bool) -> bool:
    """Return whether FSDP gathers weights in fp8, with scales that ranks agree on before casting their shards."""
    return sharded and precision == "fp8_tensorwise"


def convert_to_fp8(
    layers: Sequence[nn.Module], precision: str, *, sharded: bool, rows: int = 1, emulate: bool = False
) -> None:
    """Replace suitable linear layers in place; parameters keep their names.

    Args:
        layers: The repeated blocks. Embedding and head are not among them, and stay in bf16.
        precision: One of :data:`FP8_RECIPES`.
        sharded: Whether FSDP will shard them.
        rows: A divisor of the number of vectors in a pass, over which weight gradients are summed. Kernels need a
            multiple of 16: otherwise each product is padded.
        emulate: Compute from rounded fp32 factors, without fp8 hardware: for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # slow to import, and optional

    gathered = gathers_fp8(precision, sharded=sharded)
    recipe = Float8LinearConfig.from_recipe_name(FP8_RECIPES[precision])
    pads = rows % FP8_MULTIPLE > 0
    config = replace(recipe, enable_fsdp_float8_all_gather=gathered, pad_inner_dim=pads, emulate=emulate)
    chosen = set(fp8_layers(layers, precision, sharded=sharded))
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, _: module in chosen)


def wrapped_like(like: Tensor, values: Tensor) -> Tensor:
    """Return values wrapped for FSDP to gather in fp8, if ``like`` is so wrapped."""
    if not hasattr(like, "fsdp_pre_all_gather"):  # FSDP's hook, by which it recognizes such tensors
        return values
    wrapped: Any = like
    (name, *_), context = wrapped.__tensor_flatten__()
    return type(wrapped).__tensor_unflatten__({name: values}, context, values.size(), values.stride())


def agree_on_scales(module: nn.Module) -> None:
    """Compute the scales of a module's weights over the ranks, in one message; valid until weights change."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(module)


def forget_scales(module: nn.Module) -> None:
    """Drop the scales of :func:`agree_on_scales`, as weights may have changed; the next gather computes its own."""
    for weight in module.parameters():
        shard = getattr(weight, "_local_tensor", weight)  # where torchao keeps them; to_local() returns another object
        if hasattr(shard, "_precomputed_scale"):
            shard._precomputed_scale = None


class AgreedGradScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks skip a step together, also if only one stage or one shard of a weight overflows."""

    def __init__(self, device: str, enabled: bool) -> None:
        super().__init__(device, enabled=enabled)
        if enabled:  # torch does so when it scales a loss, which the first stages of a pipeline never do
            self._lazy_init_scale_growth_tracker(torch.device(device))

    @torch.no_grad()
    def _unscale_grads_(self, optimizer: Any, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        # By local parts: torch itself would all-reduce the overflows of DTensors, once in each dimension.
        parts = [_local_with_gradient(weight) for group in optimizer.param_groups for weight in group["params"]]
        local: Any = SimpleNamespace(param_groups=[{"params": parts}])
        overflows = super()._unscale_grads_(local, *arguments, **options)
        for overflow in overflows.values():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return overflows


def _local_with_gradient(weight: Tensor) -> Tensor:
    """Return a weight itself, or this rank's shard of it and of its gradient."""
    if not isinstance(weight, DTensor) or weight.grad is None:
        return weight
    part = local_part(weight).detach()
    part.grad = local_part(weight.grad)
    return part
