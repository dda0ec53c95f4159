"""A module with slots in place of its units, which a pass computes or stands in for."""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ptdbench.models.tape import Pass


class _Slot(nn.Module):
    """Stands in for a module, with its attributes, which the surrounding code may read."""

    def __init__(self, module: nn.Module, act: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["attribute"] = partial(getattr, module)  # neither a submodule nor part of the state here
        self.__dict__["act"] = act

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["attribute"](name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.act(*arguments, **options)


class Shell:
    """A module with slots in place of its units; the modules around them are copied, and hold no weights.

    Args:
        module: The module.
        units: The names of its units.
        loose: The names of weights outside them.
    """

    def __init__(self, module: nn.Module, units: Iterable[str], loose: Iterable[str]) -> None:
        self._loose = loose
        self._units = {name: module.get_submodule(name) for name in units}
        self._names = {unit: name for name, unit in self._units.items()}  # one may be registered twice
        self._copied: list[tuple[nn.Module, nn.Module, str]] = []  #: Copies, originals, and their names.
        self._moved: list[nn.Module] = []  #: Modules with buffers and without weights.
        #: Calls a unit, given its name, with these arguments.
        self.compute: Callable[[str, nn.Module, Any, Any], Any] = lambda _, unit, args, options: unit(*args, **options)
        self._pass: Pass | None = None
        self._device = torch.device("cpu")
        self.module = self._rebuilt(module, "")

    def run(self, within: Pass, weights: Mapping[str, Tensor], device: torch.device, call: Callable[[], Any]) -> Any:
        """Run a pass; ``weights``: the values of weights outside units, by name."""
        self._place(device)
        for copied, original, prefix in self._copied:
            copied.training = original.training
            copied.__dict__ |= {name: within.follow(weights[prefix + name]) for name in original._parameters}
        self._pass = within
        try:
            with within:
                return call()
        finally:
            self._pass = None

    def _call(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Act in place of a unit."""
        unit, within = self._units[name], self._pass
        if within is None:  # recomputation in a backward pass
            return unit(*arguments, **options)

        def run() -> Any:
            with within.paused():
                return self.compute(name, unit, arguments, options)

        return within.event(name, run, tree_leaves((arguments, options)))

    def _rebuilt(self, module: nn.Module, prefix: str) -> nn.Module:
        if module in self._names:
            return _Slot(module, partial(self._call, self._names[module]))
        if not any(name.startswith(prefix) for name in (*self._units, *self._loose)):
            if next(module.buffers(), None) is None:
                return module
            self._moved.append(module)
            return _Slot(module, module)
        copied = copy.copy(module)
        self._copied.append((copied, module, prefix))
        children, buffers = module._modules.items(), module._buffers.items()
        slots = {name: child and self._rebuilt(child, f"{prefix}{name}.") for name, child in children}
        copied.__dict__ |= {"_modules": slots, "_parameters": {}, "_buffers": {}}
        copied.__dict__ |= {name: None if buffer is None else buffer.clone() for name, buffer in buffers}
        return copied

    def _place(self, device: torch.device) -> None:
        """Move buffers outside units, such as tables of positions, to the device, as no stage holds them."""
        if device == self._device:
            return
        self._device = device
        for module in self._moved:
            module.to(device)
        for copied, original, _ in self._copied:
            for name in original._buffers:
                if isinstance(buffer := copied.__dict__[name], Tensor):
                    copied.__dict__[name] = buffer.to(device)
