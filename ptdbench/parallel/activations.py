"""Activation checkpointing and compilation, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
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


def compile_each(layers: Sequence[nn.Module]) -> None:
    """Compile layer by layer.

    Identical layers share one compiled graph, so it takes as long for 96 of them as for one, and the communication
    between layers stays between the graphs, where it can overlap.
    """
    for layer in layers:
        wrap_forward(layer, torch.compile)
