"""Splits a module without ``parts()`` into a chain: what comes before its repeated blocks, each block, what follows.

The code around the blocks is not changed: a stage runs the module's ``forward`` with a slot in place of each block.
Slots stop the pass before the first block, capture the blocks' other arguments (a mask, positions), or run the rest on
the output of the last block. So each block must be called with the output of the one before, and nothing else may
depend on the samples. Trial runs verify this.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ptdbench.models.protocol import Piece
from ptdbench.models.state import ModuleState, preserved
from ptdbench.models.trial import trial
from ptdbench.problems import first_line

#: Converts what a module's ``forward`` returns to the outputs, or with targets to the loss.
Finish = Callable[[Any, Tensor | None], Tensor]


class NoChain(Exception):
    """The reason why a module cannot be split into stages, a clause; ``remedy``: what its author can do."""

    def __init__(self, reason: str, remedy: str = "define parts()") -> None:
        super().__init__(reason)
        self.remedy = remedy


def owned(kind: str, part: nn.Module, names: Sequence[str]) -> NoChain:
    """Return the reason that ``part``, which pipeline stages would share, has such weights or buffers of its own."""
    which = " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    remedy = f"move {'them' if len(names) > 1 else 'it'} into a submodule or define parts()"
    return NoChain(f"{type(part).__name__} itself owns {kind}{which}", remedy)


def repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a module, by name.

    Blocks are the members of the longest ``ModuleList`` or ``Sequential`` of one class whose members consist of several
    modules, and of shorter lists of that class, as in a ResNet. Lists within a block, such as heads and experts, do not
    count: their members need not be called in order, nor on every rank.
    """
    lists = {
        part: list(part.children())
        for part in module.modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len({type(child) for child in part.children()}) == 1
    }
    within = {
        part for children in lists.values() if _are_blocks(children) for child in children for part in child.modules()
    }
    outer = [children for part, children in lists.items() if part not in within and len(children) > 1]
    of_several = [children for children in outer if list(children[0].children())]
    if not of_several:
        return {}
    kind = type(max(of_several, key=len)[0])
    of_kind = {child for children in lists.values() for child in children if type(child) is kind}
    blocks: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if part in of_kind and not any(name.startswith(f"{around}.") for around in blocks):
            blocks[name] = part
    return blocks


def _are_blocks(members: Sequence[nn.Module]) -> bool:
    """Whether members of a list repeat each other, unlike the stages of an image network, which grow wider."""
    shapes = {tuple(weight.shape for weight in member.parameters()) for member in members}
    return len(shapes) < len(members) and type(members[0]) not in (nn.ModuleList, nn.Sequential)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception of third-party code into a NoChain that begins with ``what``."""
    try:
        yield
    except NoChain:
        raise
    except Exception as error:
        reason = first_line(error)
        raise NoChain(f"{what}: {reason}") from error


def has_weights(module: nn.Module, recurse: bool = True) -> bool:
    """Whether a module has parameters, or with ``recurse=False`` parameters of its own."""
    return next(module.parameters(recurse), None) is not None


#: A block's first argument, its other positional arguments, and its keyword arguments.
_Arguments = tuple[Tensor, tuple[Any, ...], dict[str, Any]]

#: The arguments after the first: positional and keyword.
_OtherArguments = tuple[tuple[Any, ...], dict[str, Any]]

#: The action in place of a block: ``act(name, arguments)`` returns what the block would.
_Act = Callable[[str, _Arguments], Any]


class _Reached(Exception):
    """Stops a pass at a block whose input is this hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _stop(_: str, arguments: _Arguments) -> NoReturn:
    raise _Reached(arguments[0])


class _Slot(nn.Module):
    """Stands in for a module, with its attributes, which the surrounding code may read."""

    def __init__(self, module: nn.Module, act: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["attribute"] = partial(getattr, module)  # neither a submodule nor part of the state here
        self._act = act  # must not be a local function: a copy of the model would share it

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["attribute"](name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self._act(*arguments, **options)


class Chain:
    """A module as a chain of pieces.

    Args:
        module: The module.
        blocks: Its repeated blocks in order, by name.
        call: Calls a module with the signature of this one: ``call(module, inputs)``.
        finish: Converts the result to the outputs, or with targets to the loss: ``finish(returned, targets)``.
        example: Inputs of one sample on the meta device.

    Raises:
        NoChain: The module is not a chain.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        call: Callable[[nn.Module, Tensor], Any],
        finish: Finish,
        example: Tensor,
    ) -> None:
        self._module = module
        self._call = call
        self._finish = finish
        self._example = example
        self._blocks = dict(blocks)
        self._dtype = torch.float32  # of the hidden state
        self._device = torch.device("cpu")
        if len(self._blocks) < 2:
            raise NoChain("it has no parts() and no list of blocks of one class")
        self._before: dict[str, nn.Module] = {}  # modules with weights, by name
        self._after: dict[str, nn.Module] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._in_tuple = False
        self._act: _Act = _stop
        self._hidden_shape = torch.Size()
        self._others_of: dict[Any, dict[str, _OtherArguments]] = {}
        if any(weight.is_meta for weight in module.parameters()):
            raise NoChain("it has no parts(), and no values yet to find what its blocks depend on")
        self._copied: list[tuple[nn.Module, nn.Module]] = []  #: Copied modules, and the originals that set their modes.
        #: In the trial: what each pass starts from, so that none sees what another has counted.
        self._states: list[ModuleState] = []
        with refusing("its blocks cannot be tried apart"), trial(module):
            self._front = self._with_slots({})
            self._states = [ModuleState(module), ModuleState(self._front)]
            self._observe()
            self._back = self._with_slots(self._stubs(0.0))
            self._states.append(ModuleState(self._back))
            self._require_independence()
        self._states = []

    def parts(self, prefix: str = "") -> dict[str, nn.Module]:
        """Return the pieces in order, under ``prefix``; the last one is called with ``(hidden, targets)``."""

        def full(members: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
            return {prefix + name: member for name, member in members.items()}

        pieces: dict[str, nn.Module] = {"(before the blocks)": Piece(full(self._before), self._begin, self._front)}
        for name, block in self._blocks.items():
            pieces[name] = Piece(full({name: block}), partial(self._through, name))
        return pieces | {"(after the blocks)": Piece(full(self._after), partial(self._end, self._back), self._back)}

    def _begin(self, inputs: Tensor) -> Tensor:
        try:
            self._run(self._front, inputs, _stop)
        except _Reached as reached:
            return reached.hidden
        raise AssertionError("no block was reached")

    def _through(self, name: str, hidden: Tensor) -> Tensor:
        arguments, options = self._others(hidden)[name]
        return self._hidden(self._blocks[name](hidden, *arguments, **options))

    def _end(self, shell: nn.Module, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the outputs, or with targets the loss, if the last block returns ``hidden``."""
        self._dtype = hidden.dtype
        return self._finish(self._run(shell, self._inputs(hidden), lambda *_: self._returned(hidden)), targets)

    def _others(self, hidden: Tensor) -> dict[str, _OtherArguments]:
        """Return each block's arguments other than the hidden state, captured once per batch size."""
        key = (hidden.shape, hidden.dtype, hidden.device)
        self._dtype = hidden.dtype
        if key not in self._others_of:
            with torch.no_grad(), preserved(self._back):
                self._others_of[key] = self._capture_others(self._back, self._inputs(hidden))
        return self._others_of[key]

    def _capture_others(self, shell: nn.Module, inputs: Tensor) -> dict[str, _OtherArguments]:
        """Capture each block's arguments other than the hidden state, by name: masks may differ between blocks."""
        others: dict[str, _OtherArguments] = {}

        def act(name: str, arguments: _Arguments) -> Any:
            others[name] = arguments[1:]
            return self._returned(arguments[0]) if len(others) < len(self._blocks) else _stop(name, arguments)

        with suppress(_Reached):  # stop at the last block: the weights after it may be on another rank
            self._run(shell, inputs, act)
        return others

    def _run(self, shell: nn.Module, inputs: Tensor, act: _Act) -> Any:
        self._place(inputs.device)
        self._act = act
        for copied, original in self._copied:
            copied.training = original.training
        try:
            return self._call(shell, inputs)
        finally:
            self._act = _stop  # release the hidden state
            for state in self._states:
                state.restore()

    def _hidden(self, returned: Any) -> Tensor:
        return returned[0] if self._in_tuple else returned

    def _returned(self, hidden: Tensor) -> Any:
        return (hidden,) if self._in_tuple else hidden

    def _place(self, device: torch.device) -> None:
        """Move buffers outside pieces, such as tables of positions, to the device, as no piece does."""
        if device == self._device:
            return
        self._device = device
        for part in self._front.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)

    def _inputs(self, hidden: Tensor) -> Tensor:
        """Return dummy inputs of the right shape."""
        shape = (hidden.shape[0], *self._example.shape[1:])
        return torch.zeros(shape, dtype=self._example.dtype, device=hidden.device)

    def _at(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Act in place of a block, whose first argument may be a keyword."""
        hidden, *others = arguments or (options.pop(next(iter(options))),)
        return self._act(name, (hidden, tuple(others), options))

    def _stub(self, shape: torch.Size, fill: float, /, inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the output of a module before the blocks for this many inputs, with arbitrary values."""
        return torch.full((len(inputs), *shape[1:]), fill, dtype=self._dtype, device=inputs.device)

    def _stubs(self, fill: float) -> dict[str, nn.Module]:
        return {name: _Slot(part, partial(self._stub, self._shapes[name], fill)) for name, part in self._before.items()}

    def _with_slots(self, stubs: Mapping[str, nn.Module]) -> nn.Module:
        """Return the module with slots for blocks, and stubs; modules around them are copied, all others shared."""
        slots = {name: _Slot(block, partial(self._at, name)) for name, block in self._blocks.items()}
        replaced = {**slots, **stubs}

        def rebuilt(module: nn.Module, prefix: str) -> nn.Module:
            inside = [name for name in replaced if name.startswith(prefix)]
            if not inside:
                return module
            copied = copy.copy(module)
            self._copied.append((copied, module))
            children = {}
            for name, child in module._modules.items():
                full = f"{prefix}{name}"
                children[name] = replaced.get(full) or (rebuilt(child, f"{full}.") if child is not None else None)
            copied.__dict__["_modules"] = children
            copied.__dict__["_buffers"] = {
                name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()
            }
            return copied

        return rebuilt(self._module, "")

    def _observe(self) -> None:
        """Run the module with only its first block, and note the order in which it calls its modules."""
        names, owners = list(self._blocks), _owners(self._module, self._blocks)
        calls: list[str] = []
        returned: list[Tensor] = []

        def act(name: str, arguments: _Arguments) -> Any:
            calls.append(name)
            hidden, others, options = arguments
            if returned and hidden is not returned[-1]:
                raise NoChain(f"it does not call {name} with the output of {calls[-2]}")
            if not returned:
                returned_first = self._blocks[name](hidden, *others, **options)
                self._in_tuple = isinstance(returned_first, tuple)
                hidden = self._hidden(returned_first)
                self._hidden_shape = hidden.shape
            returned.append(hidden.clone())
            return self._returned(returned[-1])

        def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
            calls.append(name)
            self._shapes[name] = output.shape if isinstance(output, Tensor) else torch.Size()

        with ExitStack() as hooks:
            for name, owner in owners.items():
                hooks.callback(owner.register_forward_hook(partial(note, name)).remove)
            self._run(self._front, torch.zeros((2, *self._example.shape[1:]), dtype=self._example.dtype), act)
        if [name for name in calls if name in self._blocks] != names:
            raise NoChain(f"it does not call {names[0]} to {names[-1]} once each and in order")
        start, end = calls.index(names[0]), calls.index(names[-1])
        for name, owner in owners.items():
            if name not in calls:
                raise NoChain(f"it does not call {name}, which has weights")
            if start < calls.index(name) < end:
                raise NoChain(f"it calls {name} between its blocks")
            (self._before if calls.index(name) < start else self._after)[name] = owner
        if not self._before or not self._after:
            raise NoChain(f"it has no weights {'after' if self._before else 'before'} its blocks")

    def _require_independence(self) -> None:
        """Require that only the hidden state depends on the samples, and no piece on the weights of another.

        Two different samples and stub outputs verify this, and NaN in the weights of other pieces.
        """
        shape = (2, *self._example.shape[1:])
        zeros, ones = (torch.full(shape, value, dtype=self._example.dtype) for value in (0, 1))
        hidden = torch.randn((2, *self._hidden_shape[1:]))
        with torch.enable_grad():
            probe = hidden.clone().requires_grad_()
            outputs = self._end(self._back, probe).sum()
        passes = outputs.requires_grad and probe.requires_grad  # not if a function without gradients intervenes
        if not passes or torch.autograd.grad(outputs, probe, allow_unused=True) == (None,):
            raise NoChain("it passes no gradient to its last block, as under reentrant checkpointing")
        begun, others = self._begin(zeros), tree_leaves(self._capture_others(self._back, zeros))
        rest = self._end(self._back, hidden)
        with _spoiled(self._module, [*self._before.values(), *self._blocks.values()]):
            other = self._with_slots(self._stubs(1.0))
            pairs = zip(others, tree_leaves(self._capture_others(other, ones)), strict=True)
            if any(not (torch.equal(a, b) if isinstance(a, Tensor) else a is b or a == b) for a, b in pairs):
                raise NoChain("its blocks take other arguments that depend on samples or weights")
            if not torch.equal(rest, self._end(other, hidden)):
                raise NoChain("it uses what comes before its blocks after them too")
        with _spoiled(self._module, [*self._blocks.values(), *self._after.values()]):
            if not torch.equal(begun, self._begin(zeros)):
                raise NoChain("it uses what comes after its blocks before them too")


@contextmanager
def _spoiled(module: nn.Module, others: Iterable[nn.Module]) -> Iterator[None]:
    """Put NaN into the weights of ``others``, to reveal whether ``module`` reads them."""
    with preserved(module, whole=True):
        for part in (inner for other in others for inner in other.modules()):
            for name, weight in part._parameters.items():
                if weight is not None and weight.is_floating_point():
                    spoiled = torch.full((), math.nan, dtype=weight.dtype).expand_as(weight)
                    part._parameters[name] = nn.Parameter(spoiled, weight.requires_grad)
        yield


def _owners(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the outermost modules outside the blocks that have weights of their own."""
    owners: dict[str, nn.Module] = {}
    for name, part in module.named_modules(remove_duplicate=False):  # a block may run again, under another name
        inside = any(f"{name}.".startswith(f"{outer}.") for outer in (*blocks, *owners))
        if inside or not has_weights(part, recurse=False):
            continue
        if not name or any(block.startswith(f"{name}.") for block in blocks):
            raise owned("", part, [weight for weight, _ in part.named_parameters(recurse=False)])
        owners[name] = part
    return owners


def of_sequential(module: nn.Sequential, finish: Finish, prefix: str = "") -> dict[str, nn.Module]:
    """Return an ``nn.Sequential`` as a chain; modules without weights join the piece before.

    Arguments are as for :class:`Chain`.

    Raises:
        NoChain: It runs a module with weights twice, in what would be two stages.
    """
    groups: list[dict[str, nn.Module]] = [{}]
    seen: dict[nn.Module, str] = {}
    for name, child in zip(module._modules, module, strict=True):  # a child that is listed twice runs twice
        for part in child.modules():
            if has_weights(part, recurse=False) and seen.setdefault(part, name) != name:
                raise NoChain(f"it has no parts(), and runs {type(part).__name__} in both {seen[part]} and {name}")
        if has_weights(child) and any(map(has_weights, groups[-1].values())):
            groups.append({})
        groups[-1][prefix + name] = child
    return named([Piece(group, nn.Sequential(*group.values()).forward) for group in groups], finish, prefix)


def named(pieces: Sequence[Piece], finish: Finish, prefix: str) -> dict[str, nn.Module]:
    """Return the pieces in order, named after their first members; the last is called with ``(hidden, targets)``."""
    *front, last = pieces
    every = [*front, Piece(last.members, partial(_finished, last, finish))]
    return {next(iter(piece.members)).removeprefix(prefix): piece for piece in every}


def _finished(piece: Piece, finish: Finish, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
    return finish(piece(inputs), targets)
