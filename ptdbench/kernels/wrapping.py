"""Wrapping the forward of a module in place."""

from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``module.forward`` with ``wrapper(module.forward)``.

    Parameter names do not change, and hooks (DDP's, FSDP's) stay outside the wrapper.
    """
    module.forward = wrapper(module.forward)  # type: ignore[method-assign]
