"""Linear layers whose three matrix products run in fp8, through torchao."""

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

#: torchao's recipe for each precision. ``rowwise``: a scale for each row of a factor. ``tensorwise``: one scale per
#: factor, which rounds more coarsely, but uses cuBLAS's faster kernels and lets FSDP gather weights in fp8.
RECIPES: Mapping[str, str] = {"fp8": "rowwise", "fp8_tensorwise": "tensorwise"}

#: The smallest side of a weight to convert: only a large product repays the cast, which reads both factors.
SMALLEST = 512
#: fp8 kernels need both sides to be multiples of this.
MULTIPLE = 16


def is_installed() -> bool:
    """Return whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def suits(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose sides are large and divisible enough for fp8."""
    if type(module) is not nn.Linear:  # a subclass may compute something else
        return False
    sides = (module.in_features, module.out_features)
    return all(side >= SMALLEST and side % MULTIPLE == 0 for side in sides)


def converted(layers: Sequence[nn.Module], precision: str, *, sharded: bool) -> list[nn.Linear]:
    """Return the modules of ``layers`` that compute in fp8 under this precision, if it is one of :data:`RECIPES`.

    Layers themselves are excluded, as they have no parent to replace them in; so are modules with tied weights if FSDP
    gathers weights in fp8, as conversion would untie them.
    """
    inside = dict.fromkeys(module for layer in layers for module in layer.modules()) if precision in RECIPES else {}
    holders = Counter[Tensor](weight for module in inside for weight in module.parameters(recurse=False))
    gathered = is_gathered(precision, sharded=sharded)
    return [
        module
        for module in inside
        if isinstance(module, nn.Linear) and suits(module) and module not in layers
        if not (gathered and holders[module.weight] > 1)
    ]


def is_gathered(precision: object, *, sharded: bool) -> bool:
    """Return whether FSDP gathers weights in fp8, with scales that ranks agree on before casting their shards."""
    return sharded and precision == "fp8_tensorwise"


def convert(
    layers: Sequence[nn.Module], precision: str, *, sharded: bool, rows: int = 1, emulate: bool = False
) -> None:
    """Replace suitable linear layers in place; parameters keep their names.

    Args:
        layers: The repeated blocks. Embedding and head are not among them, and stay in bf16.
        precision: One of :data:`RECIPES`.
        sharded: Whether FSDP will shard them.
        rows: A divisor of the number of vectors in a pass, over which weight gradients are summed. Kernels need a
            multiple of 16: otherwise each product is padded.
        emulate: Compute from rounded fp32 factors, without fp8 hardware: for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # slow to import, and optional

    gathered = is_gathered(precision, sharded=sharded)
    recipe = Float8LinearConfig.from_recipe_name(RECIPES[precision])
    pads = rows % MULTIPLE > 0
    config = replace(recipe, enable_fsdp_float8_all_gather=gathered, pad_inner_dim=pads, emulate=emulate)
    chosen = set(converted(layers, precision, sharded=sharded))
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, _: module in chosen)


def wrapped_as(like: Tensor, values: Tensor) -> Tensor:
    """Return values wrapped for FSDP to gather in fp8, if ``like`` is so wrapped."""
    if not hasattr(like, "fsdp_pre_all_gather"):  # FSDP's hook, by which it recognizes such tensors
        return values
    wrapped: Any = like
    (name, *_), context = wrapped.__tensor_flatten__()
    return type(wrapped).__tensor_unflatten__({name: values}, context, values.size(), values.stride())


def agree(module: nn.Module) -> None:
    """Compute the scales of a module's weights over the ranks, in one message; valid until weights change."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(module)


def forget(module: nn.Module) -> None:
    """Drop the scales of :func:`agree`, as weights may have changed; the next gather computes its own."""
    for weight in module.parameters():
        shard = getattr(weight, "_local_tensor", weight)  # where torchao keeps them; to_local() returns another object
        if hasattr(shard, "_precomputed_scale"):
            shard._precomputed_scale = None
