"""The state of a module besides the values of its weights: saved, restored, or replayed.

It consists of buffers, the mode of each submodule, gradients, and whatever Python code keeps in attributes: numbers,
tensors, lists, objects of its own package. A pass that must leave no trace (a trial, a rehearsal, an evaluation)
restores it; one that repeats another (recomputation) replays it. A trial also restores the weights that it writes to.
"""

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptdbench.grouping import grouped
from ptdbench.nested import with_samples

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


@contextmanager
def trial(module: nn.Module) -> Iterator[None]:
    """Try a module in eval mode, without gradients; restore everything on exit, random state included."""
    weights = dict(module.named_parameters())
    with warnings.catch_warnings(), torch.no_grad(), preserved(module, whole=True), _Uses(weights):
        warnings.simplefilter("ignore")  # inputs without gradients, for example, are unusual only in training
        module.eval()  # no dropout, and batch norms keep their statistics
        yield


def failure(module: nn.Module, example: tuple[Any, Tensor]) -> Exception | None:
    """Return what a forward pass raises, on the meta device or else with the module's weights; ``None``: nothing.

    Args:
        module: Called as ``module(inputs, targets)``; it is as before afterwards.
        example: Inputs and targets of one sample on the meta device.
    """
    error: Exception | None = None
    for device in ("meta", None):  # code that reads values does not run on the meta device
        try:
            with trial(module):
                tensors: dict[str, Tensor] = {**dict(module.named_parameters())}
                tensors = without_values(module, device) if device else tensors
                batch = with_samples(example, 2, device or next(iter(tensors.values())).device, filled=not device)
                functional_call(module, tensors, batch)
            return None
        except Exception as raised:  # third-party code may raise anything
            error = raised
    return error


def widen_scalars(module: nn.Module, example: Callable[[], tuple[Any, Tensor]]) -> None:
    """Give weights without dimensions, such as CLIP's ``logit_scale``, the shape ``(1,)``, which FSDP can shard.

    They stay as they are if the loss of two samples depends on it, as where several are stacked, or cannot be computed.

    Args:
        module: Called as ``module(inputs, targets)``.
        example: Inputs and targets of one sample on the meta device.
    """
    named = [(part, name, weight) for part in module.modules() for name, weight in part._parameters.items()]
    scalars = [(part, name, weight) for part, name, weight in named if weight is not None and not weight.dim()]
    if not scalars or any(weight.is_meta for weight in module.parameters()):
        return
    wide = {weight: nn.Parameter(weight.detach().view(1), weight.requires_grad) for *_, weight in scalars}
    losses = list[Tensor]()
    with suppress(Exception):  # third-party code may raise anything
        for is_wide in (False, True):
            for part, name, weight in scalars:
                part._parameters[name] = wide[weight] if is_wide else weight
            with trial(module):
                for number, weight in enumerate(weight for weight in module.parameters() if weight.numel() == 1):
                    weight.fill_(0.3 + 0.1 * number)  # distinct values
                losses.append(module(*with_samples(example(), 2, "cpu", filled=True)))
    if len(losses) < 2 or not torch.equal(*losses):
        for part, name, weight in scalars:
            part._parameters[name] = weight


@dataclass(frozen=True)
class Observed:
    """The side effects of a forward pass in training, by full names."""

    weights: Sequence[str] = ()  #: Weights that it changes in place, as a momentum encoder does.
    buffers: Sequence[str] = ()  #: Buffers that it changes, other than the statistics of batch norms.
    overwritten: Sequence[str] = ()  #: The buffers that it changes in place.
    outside: Sequence[str] = ()  #: Weights of layers that it uses while their layer does not run.
    bypassed: Sequence[str] = ()  #: Those whose layer it does not call at all.


def observe(module: nn.Module, layers: Iterable[nn.Module], inputs: Any, targets: Tensor) -> Observed:
    """Observe a forward pass in training, on the meta device or, if it does not run there, with the module's weights.

    Return no observations if it runs nowhere.

    Args:
        module: Called as ``module(inputs, targets)``; it is as before afterwards.
        layers: Its repeated blocks.
        inputs: One sample, batch dimension included, on the meta device.
        targets: Its targets, likewise.
    """
    for device in ("meta", None):  # code that reads values does not run on the meta device
        with suppress(Exception):  # third-party code may raise anything
            return _observed(module, list(layers), (inputs, targets), device)
    return Observed()


def _observed(
    module: nn.Module, layers: Sequence[nn.Module], example: tuple[Any, Tensor], device: str | None
) -> Observed:
    weights: dict[str, Tensor] = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    tensors = without_values(module, device) if device else weights | buffers
    place = next(iter(tensors.values())).device
    # Two samples, for batch norms.
    two = with_samples(example, 2, place)
    present = dict(tensors)
    holders = {key: [layer for layer in layers if weight in set(layer.parameters())] for key, weight in weights.items()}
    with preserved(module, whole=True), _Uses(tensors, holders) as uses, uses.noting_calls(layers):
        Modes(module).train()
        if device:
            functional_call(module, present, two)  # which updates the dict
        else:
            module(*two)
            present = dict(chain(module.named_parameters(), module.named_buffers()))
        written = {name for name, tensor in tensors.items() if uses.has_changed(tensor)}
    changed = written | {name for name, tensor in tensors.items() if present.get(name) is not tensor}
    counted = {name for name in buffers if isinstance(module.get_submodule(name.rpartition(".")[0]), _BatchNorm)}
    outside = [name for name in weights if name in uses.outside]
    return Observed(
        [name for name in weights if name in changed],
        [name for name in buffers if name in changed - counted],
        [name for name in buffers if name in written - counted],
        outside,
        [name for name in outside if uses.called.isdisjoint(holders[name])],
    )


class _Uses(TorchDispatchMode):
    """Notes which tensors operations use while none of their layers runs, and undoes writes on exit.

    Version counters would not show writes through ``.data``.
    """

    supports_higher_order_operators = True

    def __init__(
        self, tensors: Mapping[str, Tensor], holders: Mapping[str, Collection[nn.Module]] | None = None
    ) -> None:
        super().__init__()
        self.outside: set[str] = set()  #: Names of tensors that were used while none of their holders ran.
        self.called: set[nn.Module] = set()  #: Layers that were called.
        self._running: list[nn.Module] = []
        self._holders = holders or {}
        self._aliases = [(tensor, tensor.detach()) for tensor in tensors.values()]
        aliases = zip(tensors, (alias for _, alias in self._aliases), strict=True)
        self._of_memory = grouped((_memory(alias), (name, alias)) for name, alias in aliases)
        self._before: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def noting_calls(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(lambda layer, _: self._running.append(layer)).remove)
                hooks.callback(layer.register_forward_hook(lambda layer, *_: self._running.remove(layer)).remove)
                hooks.callback(layer.register_forward_pre_hook(lambda layer, _: self.called.add(layer)).remove)
            yield

    def has_changed(self, tensor: Tensor) -> bool:
        """Return whether an operation has written to a tensor, or its memory was replaced."""
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
        parameters = getattr(getattr(func, "_schema", None), "arguments", ())  # an operator of a higher order has none
        arguments = dict(zip((argument.name for argument in parameters), args, strict=False)) | dict(kwargs or {})
        for argument in parameters:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(arguments.get(argument.name)):
                if isinstance(tensor, Tensor):
                    self._note(_memory(tensor), is_write)
        return func(*args, **(kwargs or {}))

    def _note(self, memory: int, is_write: bool) -> None:
        for name, _ in self._of_memory.get(memory, ()):
            holders = self._holders.get(name)
            if holders and not any(layer in self._running for layer in holders):
                self.outside.add(name)
        if is_write and memory in self._of_memory and memory not in self._before:
            self._before[memory] = [(alias, alias.clone()) for _, alias in self._of_memory[memory]]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
