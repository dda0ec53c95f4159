"""Splits a module without ``parts()`` into pieces; a pipeline stage runs several in a row.

A stage runs the module's own ``forward``, with a slot in place of each unit. Code between units is not changed, so
masks, positions and modes are the module's own. What comes before a stage is not computed: its units and functions
return tensors of the right shape, and those that the stage needs are received. What comes after it is not reached.

``torch.distributed.pipelining.pipeline`` also cuts such modules, but into graphs of operations for one number of
samples and one mode, with copies of the modules that FSDP, recomputation and compilation handle layer by layer.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, starmap
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from ptdbench.models.protocol import Piece, Runs
from ptdbench.models.state import Modes, trial
from ptdbench.models.tape import Diverged, Like, Pass, Recorder, Replay, Same, Shell, Stopped, Tape, combined
from ptdbench.nested import first_tensor, with_samples
from ptdbench.problems import first_line

#: Calls a module with the signature of the one that is split: ``run(module, inputs, targets)`` returns the outputs, or
#: with targets the loss.
Run = Callable[[nn.Module, Any, Tensor | None], Tensor]

#: The numbers of samples of the passes that are recorded; batch norms need two.
_SAMPLES = (2, 3)


class NoStages(Exception):
    """The reason why a module cannot be split into stages, a clause.

    ``outside``: the name of a weight that is used outside its unit.
    """

    def __init__(self, reason: str, outside: str = "") -> None:
        super().__init__(reason)
        self.outside = outside


class Stages:
    """A module as a sequence of pieces; holds names only, so that a copy of the module has the same.

    Args:
        module: The module.
        layers: Its repeated blocks, each a unit.
        run: Runs it.
        example: Inputs and targets of one sample on the meta device.

    Raises:
        NoStages: The module cannot be split.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], run: Run, example: tuple[Any, Tensor]) -> None:
        _unshare(module)
        opened, reasons = list[nn.Module](), list[NoStages]()
        while True:
            self._units, self._loose = _units(module, layers, opened)
            try:
                self._follow(module, run, example)
                break
            except NoStages as reason:
                reasons.append(reason)
                owner = module.get_submodule(reason.outside.rpartition(".")[0])
                if owner in (module, *layers, *opened) or [*owner.children()]:
                    raise reasons[0] from None
                opened.append(owner)  # a table that code around it reads, for one

    def _follow(self, module: nn.Module, run: Run, example: tuple[Any, Tensor]) -> None:
        reason = ""
        for fakes in (True, False):  # code that reads values does not run without
            try:
                with trial(module):
                    self._tapes = {mode: self._recorded(module, mode, run, example, fakes) for mode in (True, False)}
                    self._divide(module)
                    self._verify(module, run, example)
                return
            except NoStages:
                raise
            except Exception as error:  # third-party code may raise anything
                reason = first_line(error)
        raise NoStages(f"its forward cannot be followed: {reason}")

    def parts(self, module: nn.Module, prefix: str) -> dict[str, nn.Module]:
        """Return the pieces of the module in order, named after their first members; ``prefix``: of these in pieces."""
        return {
            names[0]: Piece({prefix + name: self._member(module, name) for name in names}) for names in self._pieces
        }

    def pass_of(self, mode: bool, places: range, arrived: Sequence[Tensor], samples: int, device: torch.device) -> Pass:
        """Return a pass that computes the pieces with these numbers."""
        starts = [*self._starts[mode], None]
        start = starts[places.start]
        assert start is not None
        return Replay(self._tapes[mode], start, starts[places.stop], arrived, samples, device)

    def shell(self, module: nn.Module) -> Shell:
        """Return the module with slots."""
        return Shell(module, self._units, self._loose)

    def weights(self, module: nn.Module, places: range, holder: nn.Module, prefix: str) -> dict[str, Tensor]:
        """Return weights outside units by name; of other pieces, tensors of their shapes."""
        present = {name for place in places for name in self._pieces[place]}
        return {
            name: attrgetter(prefix + name)(holder)
            if name in present
            else torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            for name, weight in ((name, module.get_parameter(name)) for name in self._loose)
        }

    def runner(self, module: nn.Module, places: range, run: Run, prefix: str) -> Runs:
        """Return a function that runs pieces of a module in a row, as a stage of a pipeline does.

        Args:
            module: The module.
            places: The numbers of the pieces.
            run: Runs the module.
            prefix: Prefix of names in the stage.
        """
        shell = self.shell(module)

        def run_pieces(holder: nn.Module, arrived: Sequence[Tensor], inputs: Any, targets: Tensor | None) -> Any:
            first = first_tensor(inputs)
            weights = self.weights(module, places, holder, prefix)
            within = self.pass_of(module.training, places, arrived, len(first), first.device)
            try:
                return shell.run(within, weights, first.device, lambda: run(shell.module, inputs, targets))
            except Stopped as stopped:
                return tuple(stopped.values)

        return run_pieces

    def _member(self, module: nn.Module, name: str) -> nn.Module:
        if name not in self._loose:
            return module.get_submodule(name)
        path, _, leaf = name.rpartition(".")
        return Loose(module.get_submodule(path), leaf)

    def _recorded(self, module: nn.Module, mode: bool, run: Run, example: tuple[Any, Tensor], fakes: bool) -> Tape:
        (Modes(module).train if mode else module.eval)()
        names = {weight: name for name, weight in module.named_parameters()}
        device = next(iter(names)).device
        passes, ends = [], frozenset[Any]()
        for samples in _SAMPLES:
            with FakeTensorMode(allow_non_fake_inputs=True) if fakes and device.type == "cpu" else nullcontext():
                batch = with_samples(example, samples, device)
                recorder = Recorder(names)
                for weight in names:  # of units too: code between units may use them
                    recorder.follow(weight)
                shell = self.shell(module)
                weights = {name: module.get_parameter(name) for name in self._loose}
                loss = shell.run(recorder, weights, device, lambda: run(shell.module, *batch))  # noqa: B023
                ends = recorder.values(loss)
            passes.append(recorder)
        few, many = passes
        return combined(few, many, ends, _SAMPLES)

    def _divide(self, module: nn.Module) -> None:
        """Set the members of each piece, as short as possible, and the first event of each in both modes."""
        weighted = {mode: _weighted(tape) for mode, tape in self._tapes.items()}
        names = [names for _, names in weighted[True]]
        if names != [names for _, names in weighted[False]]:
            raise NoStages("it calls its submodules in another order in training")
        owned = {*self._units, *self._loose}
        if outside := next((name for group in names for name in group if name not in owned), None):
            raise NoStages(f"it uses {outside} outside the module that owns it", outside=outside)
        last = {name: place for place, group in enumerate(names) for name in group}
        self._pieces: list[list[str]] = [[]]
        self._starts: dict[bool, list[int]] = {mode: [0] for mode in weighted}
        ends_at = 0
        for place, group in enumerate(names):
            numbers = {mode: weighted[mode][place][0] for mode in weighted}
            if self._pieces[-1] and place > ends_at and all(starmap(self._may_cut, numbers.items())):
                self._pieces.append([])
                for mode, number in numbers.items():
                    self._starts[mode].append(number)
            self._pieces[-1] += [name for name in group if name not in self._pieces[-1]]
            ends_at = max(ends_at, *(last[name] for name in group))
        self._place_others(module)
        if len(self._pieces) < 2:
            raise NoStages("there is no place between its submodules where only floating-point tensors pass")

    def _may_cut(self, mode: bool, number: int) -> bool:
        tape = self._tapes[mode]
        likes = [tape.events[event].returns[place] for event, place in tape.crossing(number)]
        return bool(likes) and all(isinstance(like, Like) and like.dtype.is_floating_point for like in likes)

    def _place_others(self, module: nn.Module) -> None:
        """Let modules that are not called, and further names of others, follow those with the same weights."""
        holders = {
            weight: names
            for names in reversed(self._pieces)  # the first one prevails
            for name in names
            for weight in self._member(module, name).parameters()
        }
        units = {module.get_submodule(name) for name in self._units}  # one may be registered twice
        again = {name for name, part in module.named_modules(remove_duplicate=False) if part in units}
        named = {*self._units, *self._loose, *again}
        for name in sorted(named - {name for names in self._pieces for name in names}):
            places = [holders.get(weight) for weight in self._member(module, name).parameters()]
            if not all(places):
                raise NoStages(f"it does not call {name}, which has weights")
            if places and places[0] is not None:
                places[0].append(name)

    def _verify(self, module: nn.Module, run: Run, example: tuple[Any, Tensor]) -> None:
        """Verify that the pieces in sequence compute what the module does, with stubs in place of the units.

        Gradients are compared, too: under reentrant checkpointing, what a unit returns has none.
        """
        if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
            return
        module.eval()
        samples, device = _SAMPLES[0], torch.device("cpu")
        batch = with_samples(example, samples, device, filled=True)
        weights = {name: _filled(module.get_parameter(name).shape, 0.0) for name in self._loose}
        root = torch.zeros((), requires_grad=True)

        def computed(places: range, arrived: Sequence[Tensor]) -> Any:
            shell, within = self.shell(module), self.pass_of(False, places, arrived, samples, device)
            shell.compute = partial(_stub, self._tapes[False], within, root)
            present = {name for place in places for name in self._pieces[place]}
            absent = self.weights(module, range(0), module, "")
            with torch.enable_grad():
                values = absent | {name: weight for name, weight in weights.items() if name in present}
                return shell.run(within, values, device, lambda: run(shell.module, *batch))

        all_places = range(len(self._pieces))
        expected, arrived = computed(all_places, []), list[Tensor]()
        for place in all_places:
            try:
                result = computed(range(place, place + 1), arrived)
            except Stopped as stopped:
                arrived = [*stopped.values]
        losses = [expected, result]
        slopes = [torch.autograd.grad(loss, root)[0] if loss.requires_grad else torch.zeros(()) for loss in losses]
        if not all(torch.equal(*map(torch.nan_to_num, pair)) for pair in (losses, slopes)):
            raise Diverged("its pieces, one after the other, compute something else")


class Loose(nn.Module):
    """A weight that belongs to a module around the units, such as ``cls_token``."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.__dict__["read"] = partial(getattr, owner, name)

    @property
    def weight(self) -> nn.Parameter:
        """The weight."""
        weight = self.__dict__["read"]()
        assert isinstance(weight, nn.Parameter)
        return weight

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the weight."""
        yield self.weight


def _weighted(tape: Tape) -> list[tuple[int, list[str]]]:
    """Return the numbers of events that call a unit or use weights, and the names of these."""
    pairs = (
        (number, [*([event.operation] if isinstance(event.operation, str) else []), *sorted(event.weights)])
        for number, event in enumerate(tape.events)
    )
    return [(number, names) for number, names in pairs if names]


def _units(module: nn.Module, layers: Sequence[nn.Module], opened: Sequence[nn.Module]) -> tuple[list[str], list[str]]:
    """Return the names of units, which are layers and the outermost other modules with weights of their own.

    And the names of weights that modules around layers own, or ``opened`` ones.
    """
    of_layers, units, loose = set(layers), list[str](), list[str]()
    names = {part: name for name, part in module.named_modules()}
    for part, name in names.items():
        if any(f"{name}.".startswith(f"{unit}.") for unit in units):
            continue
        within = any(inner in of_layers for inner in part.modules() if inner is not part) or not name or part in opened
        weights = [f"{name}.{weight}".removeprefix(".") for weight, _ in part.named_parameters(recurse=False)]
        if part in of_layers or (weights and not within):
            units.append(name)
        else:
            loose += weights
    return units, loose


def _unshare(module: nn.Module) -> None:
    """Replace modules of torch that are registered again under another name by copies that share their weights."""
    seen = set[nn.Module]()
    for part in [*module.modules()]:
        for name, child in [*part.named_children()]:
            if (
                child in seen
                and type(child).__module__.startswith("torch.nn")
                and not (child._modules or child._buffers)
            ):
                part._modules[name] = twin = copy.copy(child)
                twin.__dict__["_parameters"] = dict(child._parameters)
            seen.add(child)


def _filled(shape: Sequence[int], shift: float | Tensor) -> Tensor:
    """Return arbitrary values that ``shift`` changes."""
    return (torch.arange(torch.Size(shape).numel()) * 0.7 + shift).cos().reshape(shape)


def _stub(tape: Tape, within: Pass, root: Tensor, _: str, __: nn.Module, arguments: Any, options: Any) -> Any:
    """Return, in place of a unit, values that depend on all of its arguments and on ``root``."""
    event, leaves = tape.events[within.count], tree_leaves((arguments, options))
    shift = within.count + root
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            values = leaf.float().nan_to_num().clamp(-3, 3).flatten()
            shift = shift + (values * _filled(values.shape, 0.0)).sum()
    outputs = [
        leaves[like.place]
        if isinstance(like, Same)
        else _filled(like.empty(_SAMPLES[0], like.dtype, shift.device).shape, shift).to(like.dtype)
        if isinstance(like, Like)
        else like
        for like in event.returns
    ]
    return tree_unflatten(outputs, event.structure)
