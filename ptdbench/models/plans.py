"""Tensor-parallel plans for modules of others: which layers ranks split, by transformers' words or by structure.

A plan is a dict from names of modules, with ``*`` for any part of a name, to words of transformers. Without a plan,
layers that are called with the same input and the layer that follows them are a column-wise and a row-wise split. The
ranks share whole heads, of a number that trial passes of a layer's module with part of its weights find. A module that
takes no part, as it reshapes by a number of heads or slices a fused output, gets the gathered output of all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ptdbench import nested
from ptdbench.models.protocol import Kind, Role
from ptdbench.models.state import without_values
from ptdbench.models.trial import trial
from ptdbench.nested import with_samples
from ptdbench.problems import ConfigError, Problem, divisors, first_line, nearest, require, try_these

#: The roles of transformers' words; ``None``: the module stays whole.
WORDS: dict[str, Kind | None] = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "vocabulary",
    "sequence": "sequence",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "replicated",
    "replicate": None,
}

#: What takes the place of a split whose parts the module between its layers does not take.
_GATHERED: dict[Kind, Kind] = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}

#: The classes that a role can split.
_SPLIT: dict[Kind, tuple[type[nn.Module], ...]] = {
    "colwise": (nn.Linear,),
    "colwise_gather_output": (nn.Linear,),
    "rowwise": (nn.Linear,),
    "rowwise_split_input": (nn.Linear,),
    "vocabulary": (nn.Embedding,),
}


class NoPlan(Exception):
    """The module cannot be split; the message, for users, is the reason."""


def expand(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Kind]:
    """Return the kind of role of each module that a plan names.

    Raises:
        ConfigError: An entry names no module, has a word without a role here, or one that its module cannot have.
    """
    modules = dict(module.named_modules())
    weights = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    kinds: dict[str, Kind] = {}
    problems = []
    for pattern, word in plan.items():
        matches = _matches(pattern)
        named = [name for name in modules if matches(name)]
        kind = WORDS.get(word)
        odd = next((name for name in named if kind in _SPLIT and not isinstance(modules[name], _SPLIT[kind])), None)
        rule = remedy = ""
        if word not in WORDS:
            rule, remedy = "is not a split that ptdbench has", try_these(WORDS)
        elif not named:
            shapes = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules}
            rule = f"names {'a weight' if any(map(matches, weights)) else 'no module'}"
            remedy = try_these(nearest(pattern, shapes))
        elif odd is not None:
            rule = f"{odd} is of class {type(modules[odd]).__name__}, which ptdbench does not split"
        if rule:
            problems.append(Problem(f"tp_plan[{pattern}]", word, rule, remedy))
        elif kind:
            kinds |= dict.fromkeys(named, kind)
    require(*problems)
    return kinds


def _matches(pattern: str) -> Callable[[str], object]:
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch


def expand_present(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Kind]:
    """Return the kinds by the entries of a plan that name something: a class of transformers has one for all options.

    Raises:
        NoPlan: A module or weight has a word without a role here.
    """
    names = [name for name, _ in (*module.named_modules(), *module.named_parameters())]
    present = {pattern: word for pattern, word in plan.items() if any(map(_matches(pattern), names))}
    try:
        return expand(module, present)
    except ConfigError as error:
        first = error.problems[0]
        raise NoPlan(f"{first.option}={first.value} {first.rule}") from None


def roles(module: nn.Module, example: tuple[Any, Tensor], kinds: Mapping[str, Kind] | None) -> dict[str, Role]:
    """Return the roles of a module's layers, by their names in it.

    Args:
        module: Called as ``module(inputs, targets)``; it is as before afterwards.
        example: Inputs and targets of one sample on the meta device.
        kinds: Those of a plan; ``None``: find them by structure.

    Raises:
        NoPlan: No layers can be split, or a pass of the module fails.
    """
    calls = _observed(module, example)
    planned = dict(kinds) if kinds else _by_structure(calls)
    by_name = {name: Role(kind) for name, kind in planned.items()}
    units_of: dict[Any, int] = {}
    for group in _groups(calls, planned):
        parent, parts = _parent(module, group)
        features = math.gcd(*(_cut_size(module, name, planned[name]) for name in group))
        key = type(parent), str(parent), *parts
        if key not in units_of:
            units_of[key] = _whole_units(calls, group, planned, features)
        if units_of[key] == 1:
            by_name |= {name: Role(_GATHERED[planned[name]]) for name in group}
        elif units_of[key] < features:
            by_name |= {name: Role(planned[name], units_of[key], "heads") for name in group}
    return by_name | _of_tied(module, by_name)


@dataclass
class _Calls:
    """The first calls of submodules in a pass, on the meta device or with the module's weights."""

    module: nn.Module
    device: str | None
    #: Arguments, keywords and output of each submodule, by name, in the order in which they return.
    of: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)  #: Submodules that are called several times.

    def note(self, name: str, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Note a call, as a forward hook."""
        if name in self.of:
            self.repeated.add(name)
        self.of.setdefault(name, (args, options, output))

    def layers(self) -> Iterator[tuple[str, nn.Linear, Any]]:
        """Yield the linear layers that are called once, with their input, in order."""
        for name, (args, _, _) in self.of.items():
            part = self.module.get_submodule(name)
            if isinstance(part, nn.Linear) and args and name not in self.repeated:
                yield name, part, args[0]


def _observed(module: nn.Module, example: tuple[Any, Tensor]) -> _Calls:
    reason = ""
    for device in ("meta", None):  # code that reads values does not run on the meta device
        calls = _Calls(module, device)
        try:
            with trial(module), ExitStack() as hooks:
                for name, part in module.named_modules():
                    hooks.callback(part.register_forward_hook(partial(calls.note, name), with_kwargs=True).remove)
                tensors = _tensors(module, device)
                place = next(iter(tensors.values())).device
                functional_call(module, tensors, with_samples(example, 2, place, filled=not device))
            return calls
        except Exception as error:  # third-party code may raise anything
            reason = first_line(error)
    raise NoPlan(f"its layers cannot be found, as a trial pass fails: {reason}")


def _tensors(module: nn.Module, device: str | None) -> dict[str, Tensor]:
    """Return what a pass of the module computes with, by name."""
    return without_values(module, device) if device else dict(chain(module.named_parameters(), module.named_buffers()))


def _by_structure(calls: _Calls) -> dict[str, Kind]:
    """Find layers with the same input whose outputs the next layer takes: those of attention, or of an MLP."""
    kinds: dict[str, Kind] = {}
    group: list[tuple[str, nn.Linear, Any]] = []
    for name, layer, source in calls.layers():
        if group and source is group[0][2]:
            group.append((name, layer, source))
            continue
        # A fused output holds several inputs of the next layer: queries, keys and values, or a gate.
        held = max(one.out_features for _, one, _ in group) / layer.in_features if group else 0
        if held in (1, 2, 3) and layer.out_features == group[0][1].in_features:
            pair: tuple[Kind, Kind] = ("colwise", "rowwise") if held == 1 else (*_GATHERED.values(),)
            kinds |= {first: pair[0] for first, _, _ in group} | {name: pair[1]}
            group = []
        else:
            group = [(name, layer, source)]
    if not kinds:
        raise NoPlan("it has no tp_plan, and no linear layers of which one takes the output of the other")
    return kinds


def _groups(calls: _Calls, kinds: Mapping[str, Kind]) -> Iterator[list[str]]:
    """Yield each row-wise layer, in the order of calls, after the column-wise ones that feed it."""
    group: list[str] = []
    for name, _, _ in calls.layers():
        if kinds.get(name) in ("colwise", "rowwise"):
            group.append(name)
            if kinds[name] == "rowwise":
                yield group
                group = []


def _parent(module: nn.Module, names: Sequence[str]) -> tuple[nn.Module, list[str]]:
    """Return the innermost module around submodules, and their names in it."""
    paths = [name.split(".") for name in names]
    depth = min(map(len, paths)) - 1
    while len({tuple(path[:depth]) for path in paths}) > 1:
        depth -= 1
    return module.get_submodule(".".join(paths[0][:depth])), [".".join(path[depth:]) for path in paths]


def _cut_size(module: nn.Module, name: str, kind: Kind) -> int:
    return int(module.get_submodule(name).weight.shape[int(kind == "rowwise")])


def _whole_units(calls: _Calls, group: Sequence[str], kinds: Mapping[str, Kind], features: int) -> int:
    """Return the largest number of parts of which the module around a group computes one as it computes all.

    It is a divisor of ``features``: all of them in an MLP, and in attention the number of heads, of keys if fewer.
    """
    parent, parts = _parent(calls.module, group)
    path = next(name for name, one in calls.module.named_modules() if one is parent)
    if path not in calls.of:  # a list
        return 1
    (args, options, output), tensors = calls.of[path], _tensors(parent, calls.device)
    for count in reversed(divisors(features)[1:]):
        cut = dict(tensors)
        for name, part in zip(group, parts, strict=True):
            for weight in (f"{part}.weight", f"{part}.bias"):
                dimension = int(kinds[name] == "rowwise")
                if weight in cut and cut[weight].dim() > dimension:
                    whole = cut[weight]
                    cut[weight] = whole.narrow(dimension, 0, whole.shape[dimension] // count)
        with suppress(Exception), trial(parent):
            returned = functional_call(parent, cut, args, options)
            if [one.shape for one in nested.tensors(returned)] == [one.shape for one in nested.tensors(output)]:
                return count
    return 1


def _of_tied(module: nn.Module, by_name: Mapping[str, Role]) -> dict[str, Role]:
    """Return roles for the other modules with the weight of a split embedding or head."""
    kinds: dict[type[nn.Module], Kind] = {nn.Embedding: "vocabulary", nn.Linear: "colwise_gather_output"}
    split = [module.get_submodule(name) for name, role in by_name.items() if role.kind in kinds.values()]
    weights = {part.weight for part in split}
    return {
        name: Role(kinds[kind])
        for name, part in module.named_modules()
        for kind in kinds
        if isinstance(part, kind) and part.weight in weights and name not in by_name
    }
