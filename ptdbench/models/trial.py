"""Trial passes of a module, which leave nothing in it: weights that they write are put back too."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptdbench.models.state import Modes, preserved


@contextmanager
def trial(module: nn.Module) -> Iterator[None]:
    """Try a module in eval mode, without gradients; on exit all is as it was, random state included."""
    with warnings.catch_warnings(), torch.no_grad(), preserved(module, whole=True), _Writes(module.parameters()):
        warnings.simplefilter("ignore")  # of what is unusual only in a trial, such as inputs without gradients
        module.eval()  # no dropout, and batch norms keep their statistics
        yield


@dataclass(frozen=True)
class Observed:
    """What a forward pass in training does besides computing outputs, by full names."""

    weights: Sequence[str] = ()  #: Weights that it changes in place, as that of a momentum encoder does.
    buffers: Sequence[str] = ()  #: Buffers that it changes, other than the statistics of batch norms.
    overwritten: Sequence[str] = ()  #: Those of them that it changes in place.
    bypassed: Sequence[str] = ()  #: Layers that it does not call, but whose submodules it calls.


def observe(module: nn.Module, layers: Iterable[nn.Module], inputs: Tensor, targets: Tensor) -> Observed:
    """Observe a forward pass in training, on the meta device or, if it does not run there, with the module's weights.

    Args:
        module: Called as ``module(inputs, targets)``; it is as before afterwards.
        layers: Its repeated blocks.
        inputs: One sample, batch dimension included, on the meta device.
        targets: Its targets, likewise.

    Returns:
        What was observed; nothing if the pass cannot be tried.
    """
    for device in ("meta", None):  # code that reads values does not run on the meta device
        with suppress(Exception):  # third-party code may raise anything
            return _observed(module, layers, [inputs, targets], device)
    return Observed()


def _observed(
    module: nn.Module, layers: Iterable[nn.Module], example: Sequence[Tensor], device: str | None
) -> Observed:
    weights: dict[str, Tensor] = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    tensors = weights | buffers
    if device:
        tensors = {
            name: torch.empty_like(one, device=device, requires_grad=one.requires_grad) for name, one in tensors.items()
        }
    place = next(iter(tensors.values())).device
    two = [torch.zeros((2, *one.shape[1:]), dtype=one.dtype, device=place) for one in example]  # for batch norms
    present = dict(tensors)
    with preserved(module, whole=True), _bypassing(module, layers) as bypassed, _Writes(tensors.values()) as writes:
        Modes(module).train()
        if device:
            functional_call(module, present, tuple(two))  # which updates the dict
        else:
            module(*two)
            present = dict(chain(module.named_parameters(), module.named_buffers()))
        written = {name for name, tensor in tensors.items() if writes.has_changed(tensor)}
    changed = written | {name for name, tensor in tensors.items() if present.get(name) is not tensor}
    counted = {name for name in buffers if isinstance(module.get_submodule(name.rpartition(".")[0]), _BatchNorm)}
    return Observed(
        [name for name in weights if name in changed],
        [name for name in buffers if name in changed - counted],
        [name for name in buffers if name in written - counted],
        sorted(bypassed),
    )


@contextmanager
def _bypassing(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[set[str]]:
    """Yield a set that on exit holds the layers whose own submodules were called, although they were not."""
    names = {layer: name for name, layer in module.named_modules()}
    owners: dict[nn.Module, set[nn.Module]] = {}
    for layer in layers:
        for inner in layer.modules():
            owners.setdefault(inner, set()).add(layer)
    called, entered, bypassed = set[nn.Module](), set[nn.Module](), set[str]()
    with ExitStack() as hooks:
        for inner, (layer, *others) in owners.items():
            if not others:  # a module that several layers share belongs to none
                noted = called if inner is layer else entered
                hooks.callback(inner.register_forward_pre_hook(lambda *_, to=noted, of=layer: to.add(of)).remove)
        yield bypassed
    bypassed.update(names[layer] for layer in entered - called)


class _Writes(TorchDispatchMode):
    """Notes which of some tensors operations write to, and undoes that on exit.

    Version counters do not show what goes through ``.data``.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._aliases = [(tensor, tensor.detach()) for tensor in tensors]
        self._of_memory: dict[int, list[Tensor]] = {}
        for _, alias in self._aliases:
            self._of_memory.setdefault(_memory(alias), []).append(alias)
        self._before: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def has_changed(self, tensor: Tensor) -> bool:
        """Return whether an operation has written to a tensor, or other memory has taken the place of its own."""
        return _memory(tensor) in self._before or _memory(tensor) not in self._of_memory

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        with torch.no_grad():
            for tensor, alias in self._aliases:
                if _memory(tensor) != _memory(alias):  # ``.data`` was replaced, which is no operation
                    tensor.data = alias
            for alias, copied in (pair for pairs in self._before.values() for pair in pairs):
                alias.copy_(copied)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = getattr(getattr(func, "_schema", None), "arguments", ())  # an operator of a higher order has none
        given = dict(zip((one.name for one in arguments), args, strict=False)) | dict(kwargs or {})
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given.get(argument.name)):
                    if isinstance(tensor, Tensor):
                        self._keep(_memory(tensor))
        return func(*args, **(kwargs or {}))

    def _keep(self, memory: int) -> None:
        if memory in self._of_memory and memory not in self._before:
            self._before[memory] = [(alias, alias.clone()) for alias in self._of_memory[memory]]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
