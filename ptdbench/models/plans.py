"""Tensor-parallel plans for modules of others: which layers ranks split, in transformers' vocabulary or by structure.

A plan is a dict from names of modules, with ``*`` for any part of a name, to words of that vocabulary. By structure,
layers that are called with the same input are column-wise, and the layer that takes their outputs is row-wise. Ranks
share whole heads: trial passes of the module around them with part of their weights find how many there are. A module
that takes no part, as it reshapes by a number of heads or slices a fused output, gets the outputs of all ranks.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from posixpath import commonpath
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ptdbench.models.protocol import Kind, Role
from ptdbench.models.state import failure, trial, without_values
from ptdbench.nested import first_tensor, tensors
from ptdbench.problems import Problem, divisors, first_line, nearest, require, try_these

#: The roles of transformers' words; ``None``: the module stays whole.
WORDS: dict[str, Kind | None] = {
    "colwise": "colwise", "rowwise": "rowwise", "embedding_rowwise": "vocabulary",
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), "colwise_gather_output"),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), "rowwise_split_input"),
    **dict.fromkeys(("sequence", "sequence_parallel"), "sequence"),
    "replicated_with_grad_allreduce": "replicated", "replicate": None,
}  # fmt: skip

#: What takes the place of a split whose parts the module between its layers does not take.
_GATHERED: dict[Kind, Kind] = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}

#: Names of layers that ranks split together, and the dimension of each one's weight.
_Group = dict[str, int]


def expand(module: nn.Module, plan: Mapping[str, str], *, in_part: bool = False) -> dict[str, Kind]:
    """Return the kind of role of each module that a plan names.

    Args:
        module: The module.
        plan: The words by name.
        in_part: Whether the plan may name what this module does not have.

    Raises:
        ConfigError: An entry names no module, has a word without a role here, or one that its module cannot have.
    """
    modules, kinds, problems = dict(module.named_modules()), dict[str, Kind](), list[Problem]()
    weights = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for pattern, word in plan.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch
        named, kind = [name for name in modules if matches(name)], WORDS.get(word)
        takes = nn.Embedding if kind == "vocabulary" else nn.Module if kind in ("sequence", "replicated") else nn.Linear
        is_weight, rule, remedy = any(map(matches, weights)), "", ""
        if word not in WORDS and (named or is_weight or not in_part):
            rule, remedy = "is not a split that ptdbench has", try_these(WORDS)
        elif not named and (is_weight or not in_part):
            shapes = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules}
            rule, remedy = f"names {'a weight' if is_weight else 'no module'}", try_these(nearest(pattern, shapes))
        elif kind and (odd := [name for name in named if not isinstance(modules[name], takes)]):
            rule = f"{odd[0]} is of class {type(modules[odd[0]]).__name__}, which ptdbench does not split"
        if rule:
            problems.append(Problem(f"tp_plan[{pattern}]", word, rule, remedy))
        elif kind:
            kinds |= dict.fromkeys(named, kind)
    require(*problems)
    return kinds


def roles(module: nn.Module, example: tuple[Any, Tensor], kinds: Mapping[str, Kind]) -> dict[str, Role]:
    """Return the roles of a module's layers, by their names in it.

    Args:
        module: Called as ``module(inputs, targets)``; it is as before afterwards.
        example: Inputs and targets of one sample on the meta device.
        kinds: Those of a plan; without any they are found by structure.

    Raises:
        ValueError: No layers can be split, or a pass of the module fails.
    """
    calls = _Calls(module, example)
    kinds = dict(kinds) or _by_structure(calls)
    by_name, units_of = {name: Role(kind) for name, kind in kinds.items()}, dict[Any, int]()
    for group in _groups(calls, kinds):
        features = math.gcd(*(module.get_parameter(f"{name}.weight").shape[dim] for name, dim in group.items()))
        around, parts = _around(group)
        key = str(module.get_submodule(around)), *parts
        if key not in units_of:
            units_of[key] = calls.units(around, parts, features)
        if units_of[key] == 1:
            by_name |= {name: Role(_GATHERED[kinds[name]]) for name in group}
        elif units_of[key] < features:
            by_name |= {name: Role(kinds[name], units_of[key], "heads") for name in group}
    return by_name


class _Calls:
    """The calls of submodules in a trial pass, on the meta device or with the module's weights."""

    def __init__(self, module: nn.Module, example: tuple[Any, Tensor]) -> None:
        self._module = module
        #: Arguments, keywords and output of each call, by name, in the order in which they return.
        self._calls: dict[str, list[tuple[Any, dict[str, Any], Any]]] = {}

        def note(name: str, _module: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
            self._calls.setdefault(name, []).append((args, options, output))

        with ExitStack() as hooks:
            hooks.callback(module.register_forward_pre_hook(lambda *_: self._calls.clear()).remove)  # if it runs again
            for name, part in module.named_modules():
                hooks.callback(part.register_forward_hook(partial(note, name), with_kwargs=True).remove)
            if error := failure(module, example):
                raise ValueError(f"its layers cannot be found, as a trial pass fails: {first_line(error)}")

    def layers(self) -> Iterator[tuple[str, nn.Linear, Any]]:
        """Yield the linear layers that are called once, with their input, in order."""
        for name, calls in self._calls.items():
            part = self._module.get_submodule(name)
            if isinstance(part, nn.Linear) and len(calls) == 1 and calls[0][0]:
                yield name, part, calls[0][0][0]

    def units(self, name: str, group: _Group, features: int) -> int:
        """Return the largest number of parts into which a group splits so that the module around it computes one alone.

        It is a divisor of ``features``: all of them in an MLP, and in attention the number of heads, of keys if fewer.
        """
        if name not in self._calls:  # a list
            return 1
        part, (args, options, output) = self._module.get_submodule(name), self._calls[name][0]
        is_meta = first_tensor((args, options)).is_meta
        whole = without_values(part, "meta") if is_meta else dict(chain(part.named_parameters(), part.named_buffers()))
        for count in reversed(divisors(features)[1:]):
            cut = dict(whole)
            for layer, dim in group.items():
                for weight in (f"{layer}.weight", f"{layer}.bias"):
                    if weight in cut and dim < cut[weight].dim():
                        cut[weight] = cut[weight].narrow(dim, 0, cut[weight].shape[dim] // count)
            with suppress(Exception), trial(part):  # third-party code may raise anything
                returned = functional_call(part, cut, args, options)
                if [tensor.shape for tensor in tensors(returned)] == [tensor.shape for tensor in tensors(output)]:
                    # Parts of a head pass where its features are taken for positions.
                    return count if features // count >= getattr(part, "head_dim", 1) else 1
        return 1


def _by_structure(calls: _Calls) -> dict[str, Kind]:
    """Find layers with the same input whose outputs the next layer takes, as in attention or an MLP."""
    kinds: dict[str, Kind] = {}
    group: list[tuple[str, nn.Linear, Any]] = []
    for name, layer, source in calls.layers():
        # A fused output holds several inputs of the next layer: queries, keys and values, or a gate.
        inputs = max(linear.out_features for _, linear, _ in group) / layer.in_features if group else 0
        if group and source is group[0][2]:
            group.append((name, layer, source))
        elif inputs in (1, 2, 3) and layer.out_features == group[0][1].in_features:
            first, second = _GATHERED if inputs == 1 else _GATHERED.values()
            kinds |= dict.fromkeys((member for member, _, _ in group), first) | {name: second}
            group = []
        else:
            group = [(name, layer, source)]
    if not kinds:
        raise ValueError("it has no tp_plan, and no linear layers of which one takes the output of the other")
    return kinds


def _groups(calls: _Calls, kinds: Mapping[str, Kind]) -> Iterator[_Group]:
    """Yield each row-wise layer, in the order of calls, after the column-wise ones that feed it."""
    group: _Group = {}
    for name, _, _ in calls.layers():
        if (kind := kinds.get(name)) in _GATHERED:
            group[name] = int(kind == "rowwise")
            if kind == "rowwise":
                yield group
                group = {}


def _around(group: _Group) -> tuple[str, _Group]:
    """Return the name of the innermost module around layers, and the group by the names in it."""
    paths = [name.rpartition(".")[0].replace(".", "/") for name in group]
    around = commonpath(paths).replace("/", ".")
    return around, {name.removeprefix(f"{around}."): dim for name, dim in group.items()}
