"""Linear layers whose three matrix products run in fp8, by torchao: each row of a factor has a scale of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

#: The smallest side of a weight that is converted. Casting costs as much as reading both factors, which a large product
#: repays and a small one does not.
SMALLEST = 512
#: What fp8 kernels want of both sides.
MULTIPLE = 16


def is_installed() -> bool:
    """Return whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def suits(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose sizes are large and even enough."""
    if type(module) is not nn.Linear:  # a subclass may compute something else
        return False
    sides = (module.in_features, module.out_features)
    return all(side >= SMALLEST and side % MULTIPLE == 0 for side in sides)


def convert(layers: Sequence[nn.Module], *, emulate: bool = False) -> None:
    """Replace the linear layers that suit, in place; parameters and their names stay as they are.

    Args:
        layers: The repeated blocks. Embedding and head are none: they stay in bf16.
        emulate: Compute the same from rounded fp32 factors, without fp8 hardware: for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # slow to import, and optional

    how = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=how, module_filter_fn=lambda module, _: suits(module))
