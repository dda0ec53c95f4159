"""Modules of given parts, whose forward pass is a function."""

from collections.abc import Callable
from typing import Any

from torch import nn


def assembled(forward: Callable[..., Any], /, base: type[nn.Module] = nn.Module, **parts: Any) -> Any:
    """A module of a class of its own, with what these keywords name: modules, weights, buffers or anything else."""
    module = type("Assembled", (base,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module
