"""Parameters that a module reads as something computed from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn


def read_as(module: nn.Module, names: tuple[str, ...], how: Callable[[Tensor], Tensor]) -> None:
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
