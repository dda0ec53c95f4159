"""Activation checkpointing, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def wrap_forward(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``module.forward`` with ``wrapper(module.forward)``.

    Parameter names do not change, and hooks (DDP's, FSDP's) stay outside the wrapper.
    """
    module.forward = wrapper(module.forward)  # type: ignore[method-assign]


def recompute(layers: Sequence[nn.Module]) -> None:
    """Apply activation checkpointing: keep only each layer's input, and recompute the layer in the backward pass."""
    for layer in layers:
        wrap_forward(layer, lambda forward: partial(checkpoint, forward, use_reentrant=False))
