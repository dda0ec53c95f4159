"""What a module's forward computes between its units, in order: an event for each operation, and what it uses.

Units are modules with weights that run as a whole. Values are followed through torch's functions, so nothing of the
module's code is rewritten: control flow, sizes and modes are the pass's own. A pass runs in a shell: the module with
slots in place of its units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

#: A tensor that an event returns: the number of the event, and the place of the tensor among all that it returns.
Value: TypeAlias = tuple[int, int]

#: The events that read a value of a tensor into Python.
_READS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "numpy"})


class Diverged(Exception):
    """A pass does not compute what the recorded one did, for the reason in the message."""


@dataclass(frozen=True)
class Like:
    """The shape and dtype of a returned tensor; sizes are linear in the number of samples."""

    sizes: Sequence[tuple[int, int]]  #: A constant, and a factor of the number of samples, for each dimension.
    dtype: torch.dtype

    def empty(self, samples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of this shape that takes no memory; ``dtype``: of the floating-point values of the pass."""
        dtype = dtype if self.dtype == torch.float32 else self.dtype
        shape = [constant + factor * samples for constant, factor in self.sizes]
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True)
class Same(Like):
    """A returned tensor that is one of the arguments."""

    place: int  #: Its place among the leaves of the arguments.


@dataclass(frozen=True)
class Event:
    """An operation on values that depend on weights: the call of a unit, or a function between units."""

    operation: Any  #: The name of the unit, or the function.
    uses: frozenset[Value]  #: The values among its arguments.
    weights: frozenset[str]  #: Names of weights outside units, or of other units, that it uses.
    returns: Sequence[Any]  #: The leaves of what it returns: Like, Same, or a constant.
    structure: TreeSpec  #: How these leaves are arranged.


class Pass(TorchFunctionMode):
    """A pass of a module's forward that counts events; subclasses say what becomes of one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0  #: Events so far.
        self._token = object()  # of this pass: the marks of others are void

    def event(self, operation: Any, run: Callable[[], Any], leaves: Sequence[Any]) -> Any:
        """Handle an operation on these arguments, and return its result."""
        raise NotImplementedError

    def follow(self, returned: Any) -> Any:
        """Mark the tensors that an event has returned, and return it."""
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                leaf.followed_by = self._token  # type: ignore[attr-defined]
        return returned

    def is_followed(self, leaf: Any) -> bool:
        """Whether a value depends on weights."""
        return isinstance(leaf, Tensor) and getattr(leaf, "followed_by", None) is self._token

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a unit run without this mode."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        run = partial(func, *args, **(kwargs or {}))
        return self.event(func, run, leaves) if any(map(self.is_followed, leaves)) else run()


class Recorder(Pass):
    """Records the events of a pass.

    Args:
        names: Names of weights by tensor.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._values: dict[int, Value] = {}
        self._names = names
        self._kept: list[Tensor] = []  # an id is unique only while its object lives

    def event(self, operation: Any, run: Callable[[], Any], leaves: Sequence[Any]) -> Any:
        """Run the operation, and record it if it returns tensors, or reads one."""
        uses = self.values(leaves)
        weights = frozenset(self._names[leaf] for leaf in leaves if isinstance(leaf, Tensor) and leaf in self._names)
        returned = run()
        outputs, structure = tree_flatten(returned)
        if not any(isinstance(leaf, Tensor) for leaf in outputs) and not is_read(operation):
            return returned
        places = {id(leaf): place for place, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, Tensor)}
        returns = list(outputs)
        for place, leaf in enumerate(outputs):
            if not isinstance(leaf, Tensor):
                continue
            shape: tuple[Any, torch.dtype] = [(size, 0) for size in leaf.shape], leaf.dtype
            is_same = id(leaf) in places
            returns[place] = Same(*shape, places[id(leaf)]) if is_same else Like(*shape)
            if not is_same or _writes(operation):  # dropout in evaluation, for one, returns its argument
                self._values[id(leaf)] = (self.count, place)
                self._kept.append(leaf)
                self.follow(leaf)
        self.events.append(Event(operation, uses, weights, returns, structure))
        self.count += 1
        return returned

    def values(self, tree: Any) -> frozenset[Value]:
        """Return the values among the leaves of a tree."""
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        return frozenset(self._values[id(tensor)] for tensor in tensors if id(tensor) in self._values)


@dataclass(frozen=True)
class Tape:
    """The events of a forward pass, whatever the number of samples."""

    events: Sequence[Event]
    ends: frozenset[Value]  #: The values that the result uses.

    def __deepcopy__(self, _: Any) -> Tape:
        return self  # functions of C have no copies

    def crossing(self, cut: int) -> list[Value]:
        """Return the values from before event number ``cut`` that it and later ones use."""
        used = self.ends.union(*(event.uses for event in self.events[cut:]))
        # What Python has read may decide anything that follows.
        reads = (event.uses for event in self.events[:cut] if is_read(event.operation))
        return sorted(value for value in used.union(*reads) if value[0] < cut)


def is_read(operation: Any) -> bool:
    """Whether an operation reads values of a tensor into Python."""
    return getattr(operation, "__name__", "") in _READS


def _writes(operation: Any) -> bool:
    """Whether a function is named like those that write to their argument."""
    name = getattr(operation, "__name__", "")
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def combined(first: Recorder, second: Recorder, ends: frozenset[Value], samples: tuple[int, int]) -> Tape:
    """Return the tape of two passes with different numbers of ``samples``; raise Diverged if they differ in more."""
    events = []
    for number, (event, match) in enumerate(zip(first.events, second.events, strict=False)):
        alike = (event.operation, event.uses, event.weights) == (match.operation, match.uses, match.weights)
        if not alike or len(event.returns) != len(match.returns):
            raise Diverged("its forward takes another path for another number of samples")
        returns = list(event.returns)
        for place, (like, twin) in enumerate(zip(event.returns, match.returns, strict=True)):
            if isinstance(like, Like) and isinstance(twin, Like):
                pairs = zip(like.sizes, twin.sizes, strict=True)
                sizes = [_linear(few, many, samples) for (few, _), (many, _) in pairs]
                returns[place] = replace(like, sizes=sizes)
            elif not isinstance(like, int | float | bool | str | None):
                raise Diverged(f"{event.operation} (event {number}) returns {type(like).__name__}")
        events.append(replace(event, returns=returns))
    if len(first.events) != len(second.events):
        raise Diverged("its forward takes another path for another number of samples")
    return Tape(events, ends)


def _linear(few: int, many: int, samples: tuple[int, int]) -> tuple[int, int]:
    factor = (many - few) // (samples[1] - samples[0])
    return few - factor * samples[0], factor


class Replay(Pass):
    """A pass that computes the events of a tape from number ``start`` until ``stop``.

    Earlier events are not computed: they return arriving values, and elsewhere tensors of the right shape.

    Args:
        tape: The tape.
        start: The first event to compute.
        stop: The event that ends the pass; ``None``: none does.
        arriving: The values from before ``start`` that later events use.
        samples: Number of samples.
        device: The device of the pass.
    """

    def __init__(
        self,
        tape: Tape,
        start: int,
        stop: int | None,
        arriving: Sequence[Tensor],
        samples: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._tape, self._start, self._stop = tape, start, stop
        keys = tape.crossing(start) if start else []
        self._arriving = dict(zip(keys, arriving, strict=True))
        self._departing: dict[Value, Tensor | None] = dict.fromkeys(tape.crossing(stop) if stop is not None else [])
        for value in self._departing.keys() & self._arriving.keys():
            self._departing[value] = self._arriving[value]
        dtypes = [tensor.dtype for tensor in arriving if tensor.is_floating_point()]
        self._empty = samples, next(iter(dtypes), torch.float32), device

    def event(self, operation: Any, run: Callable[[], Any], leaves: Sequence[Any]) -> Any:
        """Compute the event, or return a stand-in for its result; raise Stopped at the last one."""
        number = self.count
        if number == self._stop and self._is_next(operation):
            raise Stopped([tensor for tensor in self._departing.values() if tensor is not None])
        if number >= self._start:
            return self._computed(operation, run)
        if not self._is_next(operation):
            return run()  # of a shape, for example
        event = self._tape.events[number]
        if is_read(operation):  # of a value that has arrived
            self.count += 1
            return run()
        outputs = [self._substitute((number, place), like, leaves) for place, like in enumerate(event.returns)]
        self.count += 1
        return self.follow(tree_unflatten(outputs, event.structure))

    def _is_next(self, operation: Any) -> bool:
        if self.count < len(self._tape.events) and self._tape.events[self.count].operation == operation:
            return True
        if isinstance(operation, str):
            raise Diverged(f"its forward calls {operation} out of order")
        return False

    def _substitute(self, value: Value, like: Any, leaves: Sequence[Any]) -> Any:
        if value in self._arriving:
            return self._arriving[value]
        if isinstance(like, Same):
            return leaves[like.place]
        return like.empty(*self._empty) if isinstance(like, Like) else like

    def _computed(self, operation: Any, run: Callable[[], Any]) -> Any:
        returned = run()
        outputs = tree_leaves(returned)
        if not any(isinstance(leaf, Tensor) for leaf in outputs) and not is_read(operation):
            return returned
        if self._stop is not None and not self._is_next(operation):
            raise Diverged(f"its forward takes another path at {getattr(operation, '__name__', operation)}")
        for place, leaf in enumerate(outputs):
            if (self.count, place) in self._departing:
                self._departing[self.count, place] = leaf
        self.count += 1
        return self.follow(returned)


class Stopped(Exception):
    """Ends a pass with the values that later events use."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.values = values


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
