"""The state of a module besides the values of its weights: saved, restored, or replayed.

It consists of buffers, the mode of each submodule, gradients, and whatever Python code keeps in attributes: numbers,
tensors, lists, objects of its own package. A pass that must leave no trace (a trial, a rehearsal, an evaluation)
restores it; one that repeats another (recomputation) replays it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_LEAVES = (int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, ModuleType, Tensor)

#: The dicts of ``nn.Module`` for weights, submodules and hooks.
_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}


class ModuleState:
    """The state of a module and of its submodules at one moment, buffers copied.

    Args:
        module: The module; its weights are not copied.
        whole: Whether dicts of weights, submodules and hooks are part of the state; not once a layout manages them.
    """

    def __init__(self, module: nn.Module, *, whole: bool = False) -> None:
        self._module, self._whole = module, whole
        self._contents = list(_containers(module, whole))
        self._gradients = [(weight, weight.grad, weight.requires_grad) for weight in module.parameters()]
        contents = (content.values() if isinstance(content, dict) else content for _, content in self._contents)
        tensors = {id(value): value for content in contents for value in content if _is_copied(value)}
        with torch.no_grad():
            self._copies = {key: (tensor, tensor.clone()) for key, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state: each buffer and attribute is the same object again, with the same content."""
        _fill(self._contents)
        for tensor, copied in self._copies.values():
            if not (tensor.is_meta or torch.equal(tensor, copied)):  # writing would invalidate what autograd has saved
                tensor.copy_(copied)
        for weight, gradient, is_trained in self._gradients:
            if weight.grad is not gradient:
                weight.grad = gradient
            if weight.requires_grad != is_trained:
                weight.requires_grad_(is_trained)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run the module on copies of this state; on exit its present state is back, unchanged."""
        present = list(_containers(self._module, self._whole))
        copies = {key: copied.clone() for key, (_, copied) in self._copies.items()}

        def substituted(content: Any) -> Any:
            if isinstance(content, dict):
                return {key: copies.get(id(value), value) for key, value in content.items()}
            return type(content)(copies.get(id(value), value) for value in content)

        _fill((held, substituted(content)) for held, content in self._contents)
        try:
            yield
        finally:
            _fill(present)


def without_values(module: nn.Module, device: torch.device | str) -> dict[str, Tensor]:
    """Return empty tensors in place of a module's weights and buffers, by name, for a functional call."""
    held = chain(module.named_parameters(), module.named_buffers())
    return {name: torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad) for name, tensor in held}


def has_state(module: nn.Module) -> bool:
    """Whether a pass may change a module's state: it has buffers, or code from outside torch and this package."""
    return any(True for _ in module.buffers()) or any(map(_packages, map(type, module.modules())))


@contextmanager
def preserved(module: nn.Module, device: torch.device | None = None, *, whole: bool = False) -> Iterator[None]:
    """Restore on exit the state of a module, and of the random generators of the CPU and of a GPU ``device``."""
    state = ModuleState(module, whole=whole)
    try:
        with torch.random.fork_rng([device] if device and device.type == "cuda" else []):
            yield
    finally:
        state.restore()


class Modes:
    """The modes of a module's parts in training and in evaluation.

    A part that the constructor has put into eval mode stays there, as it is frozen; but a module that is in eval mode
    as a whole, as ``from_pretrained`` returns it, is trained.

    Args:
        module: The module as it was built; both methods call its ``train``, which its class may override.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._frozen = [part for part in module.modules() if not part.training] if module.training else []

    def train(self) -> None:
        """Set the modes of training."""
        self._module.train()
        for part in self._frozen:
            part.training = False

    def evaluate(self) -> None:
        """Set the modes of evaluation."""
        self._module.eval()


def _containers(module: nn.Module, whole: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes, as dicts, of a module and of all modules and objects of its package that it holds.

    Also yield the mutable containers among them; each once, with a shallow copy as a plain container.
    """
    packages = frozenset({"types"}).union(*map(_packages, map(type, module.modules())))  # SimpleNamespace is in types
    pending, seen = [module], set[int]()
    while pending:
        value: Any = pending.pop()
        held, hidden = value, frozenset[str]()
        if isinstance(value, nn.Module):
            held, hidden = vars(value), frozenset() if whole else _INTERNAL
            pending += value.children()
        elif not isinstance(value, dict | list | set | deque | tuple):
            if type(value).__module__.partition(".")[0] not in packages or not hasattr(value, "__dict__"):
                continue
            held = vars(value)
        if id(held) in seen:
            continue
        seen.add(id(held))
        if not isinstance(held, tuple):
            yield held, next(kind(held) for kind in (dict, set, list) if isinstance(held, kind) or kind is list)
        inner = (held[key] for key in held.keys() - hidden) if isinstance(held, dict) else held
        pending += [value for value in inner if not isinstance(value, _LEAVES)]


@cache
def _packages(kind: Any) -> frozenset[str]:
    """Return the packages of a class and its bases, except torch and this one, whose objects are no state."""
    return frozenset({base.__module__.partition(".")[0] for base in kind.__mro__} - {"torch", "ptdbench", "builtins"})


def _fill(contents: Iterable[tuple[Any, Any]]) -> None:
    """Give each container its content, unless it holds the same objects already."""
    for held, content in contents:
        if isinstance(held, set) or _identities(held) != _identities(content):
            held.clear()
            (held.update if isinstance(held, dict | set) else held.extend)(content)


def _identities(held: Any) -> list[Any]:
    return [(key, id(value)) for key, value in held.items()] if isinstance(held, dict) else list(map(id, held))


def _is_copied(value: object) -> bool:
    """Whether an attribute is a tensor that is part of the state: neither a weight nor computed from one."""
    return isinstance(value, Tensor) and not value.requires_grad and not isinstance(value, nn.Parameter)
