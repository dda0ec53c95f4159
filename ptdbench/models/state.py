"""The state of a module besides the values of its weights: taken, put back, or run again.

Buffers, the mode of each submodule, gradients, and whatever Python code keeps in attributes: numbers, tensors, lists,
objects of its own package. A pass that must leave no trace (a trial, a rehearsal, an evaluation) puts it back; one that
repeats another (recomputation) runs on what the first one had.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

#: The mutable containers of Python whose content is part of the state.
_CONTAINERS = (dict, list, set, deque)

_LEAVES = (int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, ModuleType, Tensor)

#: The dicts in which ``nn.Module`` itself keeps weights, submodules and hooks.
_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}

_Generator = torch.Generator | random.Random


class ModuleState:
    """The state of a module and of its submodules at one moment, buffers copied.

    Args:
        module: The module; its weights are not copied.
        whole: Whether its dicts of weights, submodules and hooks are part of the state; not once a layout manages them.
    """

    def __init__(self, module: nn.Module, *, whole: bool = False) -> None:
        self._module, self._whole = module, whole
        self._contents = [(label, held, _content(held)) for label, held in _containers(module, whole)]
        self._gradients = [(weight, weight.grad, weight.requires_grad) for weight in module.parameters()]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._drawn: list[tuple[_Generator, Any]] = []
        with torch.no_grad():
            for value in (value for _, held, _ in self._contents for value in _values(held)):
                if isinstance(value, _Generator):
                    self._drawn.append((value, _state_of(value)))
                elif _is_copied(value) and id(value) not in self._copies:
                    self._copies[id(value)] = value, value.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the state back: each buffer and attribute is the same object again, with the same content."""
        _fill((held, content) for _, held, content in self._contents)
        for tensor, copied in self._copies.values():
            if not _is_equal(tensor, copied):  # what autograd has saved of the others stays valid
                tensor.copy_(copied)
        _rewind(self._drawn)
        for weight, gradient, is_trained in self._gradients:
            if weight.grad is not gradient:
                weight.grad = gradient
            if weight.requires_grad != is_trained:
                weight.requires_grad_(is_trained)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run the module on copies of this state; on exit its present state is back, in which nothing was written."""
        present = [(held, _content(held)) for _, held in _containers(self._module, self._whole)]
        drawn = [(generator, _state_of(generator)) for generator, _ in self._drawn]
        copies = {key: copied.clone() for key, (_, copied) in self._copies.items()}
        _fill((held, _substituted(content, copies)) for _, held, content in self._contents)
        _rewind(self._drawn)
        try:
            yield
        finally:
            _fill(present)
            _rewind(drawn)

    def changes(self) -> list[str]:
        """Return the full names of buffers and attributes that differ now; tensors by value, but not on the meta device."""
        names: dict[str, None] = {}
        for label, held, content in self._contents:
            if isinstance(held, dict):
                now: dict[Any, Any] = held
                for key in {**content, **now}:
                    if key not in now or key not in content or self._differs(now[key], content[key]):
                        names[_joined(label, key)] = None
            elif not _is_same(held, content) or any(self._differs(value, value) for value in content):
                names[label] = None
        return list(names)

    def _differs(self, value: Any, before: Any) -> bool:
        if value is not before:
            return isinstance(before, (Tensor, *_CONTAINERS)) or value != before
        return id(value) in self._copies and not _is_equal(*self._copies[id(value)])


def has_state(module: nn.Module) -> bool:
    """Whether a pass may change a module's state: it has buffers, or code other than torch's and this package's."""
    return any(True for _ in module.buffers()) or any(_packages(type(part)) for part in module.modules())


@contextmanager
def preserved(module: nn.Module) -> Iterator[ModuleState]:
    """Put the whole state of a module back on exit, and that of the CPU's random generators; yields the state."""
    state, drawn = ModuleState(module, whole=True), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield state
    finally:
        random.setstate(drawn)
        state.restore()


class Modes:
    """The modes of a module's parts in training and in evaluation.

    A part that the constructor has put into eval mode stays there: it is frozen. A module that is in eval mode as a
    whole, as ``from_pretrained`` returns it, is not.

    Args:
        module: The module as it was built; both methods call its ``train``, which its class may override.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._frozen = [part for part in module.modules() if not part.training] if module.training else []
        self._others: list[nn.Module] = []

    def extend(self, module: nn.Module) -> None:
        """Include the parts of ``module``, such as a stage, that the module itself does not have."""
        self._others = [part for part in module.modules() if part not in set(self._module.modules())]

    def train(self) -> None:
        """Set the modes of training."""
        self._set(True)
        for part in self._frozen:
            part.training = False

    def evaluate(self) -> None:
        """Set the modes of evaluation."""
        self._set(False)

    def _set(self, is_training: bool) -> None:
        self._module.train(is_training)
        for part in self._others:
            part.training = is_training


def _containers(module: nn.Module, whole: bool) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and of all modules and objects of its package that it holds, as dicts.

    The containers among the attributes too; each once, with a full name.
    """
    pending: list[tuple[str, Any]] = [("", module)]
    packages = frozenset({"types"}).union(*(_packages(type(part)) for part in module.modules()))  # SimpleNamespace's
    seen: set[int] = set()
    while pending:
        label, value = pending.pop()
        held, hidden, children = value, frozenset[str](), dict[str, Any]()
        if isinstance(value, nn.Module):
            held, hidden, children = vars(value), frozenset() if whole else _INTERNAL, value._modules
        elif not isinstance(value, (*_CONTAINERS, tuple)):
            if type(value).__module__.partition(".")[0] not in packages or not hasattr(value, "__dict__"):
                continue
            held = vars(value)
        if id(held) in seen:
            continue
        seen.add(id(held))
        if not isinstance(held, tuple):
            yield label, held
        inner = held.items() if isinstance(held, dict) else ((None, one) for one in held)
        pending += [
            (label if key in (None, "_buffers", "_parameters") else _joined(label, key), one)
            for key, one in inner
            if not isinstance(one, _LEAVES) and key not in hidden
        ]
        pending += [(_joined(label, name), child) for name, child in children.items() if child is not None]


@cache
def _packages(kind: type) -> frozenset[str]:
    """Return the packages of a class and its bases, other than torch and this one, whose objects are no state."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return frozenset(names - {"torch", "ptdbench", "builtins"})


def _joined(label: str, key: object) -> str:
    return f"{label}.{key}" if label else str(key)


def _values(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def _content(held: Any) -> Any:
    """Return a shallow copy of a container, as a plain one."""
    return next(kind(held) for kind in (dict, set, list) if isinstance(held, kind) or kind is list)


def _is_same(held: Any, content: Any) -> bool:
    """Whether a container holds the same objects as ``content``, in the same order."""
    if isinstance(held, set) or (isinstance(held, dict) and list(held) != list(content)):
        return held == content
    values, others = list(_values(held)), list(_values(content))
    return len(values) == len(others) and all(one is other for one, other in zip(values, others, strict=True))


def _fill(contents: Iterable[tuple[Any, Any]]) -> None:
    """Give containers the content beside them, unless they have it."""
    for held, content in contents:
        if not _is_same(held, content):
            held.clear()
            (held.update if isinstance(held, dict | set) else held.extend)(content)


def _substituted(content: Any, copies: Mapping[int, Tensor]) -> Any:
    """Return a container's content with copies in place of the tensors that have one."""
    if isinstance(content, dict):
        return {key: copies.get(id(value), value) for key, value in content.items()}
    return type(content)(copies.get(id(value), value) for value in content)


def _is_copied(value: object) -> bool:
    """Whether an attribute is a tensor whose content is part of the state: neither a weight nor computed from one."""
    return isinstance(value, Tensor) and not value.requires_grad and not isinstance(value, nn.Parameter)


def _is_equal(tensor: Tensor, copied: Tensor) -> bool:
    return tensor.is_meta or torch.equal(tensor, copied)


def _state_of(generator: _Generator) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def _rewind(states: Iterable[tuple[_Generator, Any]]) -> None:
    for generator, state in states:
        (generator.set_state if isinstance(generator, torch.Generator) else generator.setstate)(state)
