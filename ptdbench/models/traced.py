"""Splits a module without ``parts()`` into a chain: traces its forward, and splits where a single tensor passes.

``torch.distributed.pipelining.pipeline`` would decompose modules into operations with the dropout of training, so that
evaluation would need separate stages. With ``torch.fx`` submodules stay intact, and only the operations between them
are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from ptdbench.models.chain import Finish, NoChain, has_weights, named, owned, refusing
from ptdbench.models.protocol import Piece
from ptdbench.models.state import ModuleState, preserved
from ptdbench.models.trial import trial


def parts(
    module: nn.Module,
    blocks: Collection[nn.Module],
    call: Callable[[nn.Module, Tensor], Any],
    finish: Finish,
    example: Tensor,
    prefix: str,
) -> dict[str, nn.Module]:
    """Return the pieces of a module, by name; its blocks stay whole.

    Arguments are as for :class:`ptdbench.models.chain.Chain` and :meth:`ptdbench.models.chain.Chain.parts`.

    Raises:
        NoChain: The module cannot be traced, or there is no place to split it.
    """
    called = _Called(module, call)
    groups = _groups(module, list(_traced(called, blocks).nodes))
    if len(groups) < 2:
        raise NoChain("more than one tensor passes between its submodules")
    pieces = [_piece(called, nodes, prefix) for nodes in groups]
    _try(module, call, pieces, example)
    return named(pieces, finish, prefix)


class _Tracer(fx.Tracer):
    """Traces into modules that are not blocks and own no tensors, so that only calls of whole modules use weights."""

    def __init__(self, blocks: Collection[nn.Module]) -> None:
        super().__init__()
        self._blocks = blocks

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        tensors = chain(m.parameters(recurse=False), m.buffers(recurse=False))
        return m in self._blocks or super().is_leaf_module(m, module_qualified_name) or next(tensors, None) is not None


class _Called(nn.Module):
    """A wrapper of a module that takes only the inputs."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, inputs: Tensor) -> Any:
        return self._call(self.module, inputs)


def _traced(called: _Called, blocks: Collection[nn.Module]) -> fx.Graph:
    """Trace the module; names of submodules begin with ``module.``."""
    for kind, tensors in {"": called.module.named_parameters, "buffer ": called.module.named_buffers}.items():
        if names := [name for name, _ in tensors(recurse=False)]:
            raise owned(kind, called.module, names)
    with refusing("it cannot be traced"), preserved(called.module, whole=True):  # the module may cache a proxy
        graph = _Tracer(blocks).trace(called)
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target).startswith("module."):  # not a constant, which is in no module
            raise NoChain(f"it reads {str(node.target).removeprefix('module.')} outside the module that owns it")
    return graph


def _groups(module: nn.Module, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Group the nodes into as many pieces as possible: each has weights, and passes on one value."""
    places = {node: place for place, node in enumerate(nodes)}
    calls = [node for node in nodes if node.op == "call_module"]
    weighted = {call for call in calls if has_weights(module.get_submodule(str(call.target).removeprefix("module.")))}
    last_call = {node.target: places[node] for node in calls}
    ends: list[int] = []
    end: int | None = None  # where the current group may end: the last such place after its last weight
    bound, is_weighted = 0, False
    for place, node in enumerate(nodes):
        if node in weighted:
            is_weighted = True
            if end is not None:
                ends.append(end)
                end = None
        bound = max(bound, last_call.get(node.target, 0) if node.op == "call_module" else 0)
        crossing = [earlier for earlier in nodes[: place + 1] if any(places[user] > place for user in earlier.users)]
        if is_weighted and place >= bound and len(crossing) == 1 and crossing[0].op != "placeholder":
            end = place + 1
    return [list(nodes[start:stop]) for start, stop in pairwise([0, *ends, len(nodes)])]


def _piece(called: _Called, nodes: Sequence[fx.Node], prefix: str) -> Piece:
    """Create a piece that replays these nodes on their single input."""
    inside = set(nodes)
    graph = fx.Graph()
    outside = {used for node in nodes for used in node.all_input_nodes} - inside
    copies = {used: graph.placeholder("hidden") for used in outside}  # one, or none for the first piece
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    if nodes[-1].op != "output":
        (value,) = (node for node in nodes if any(user not in inside for user in node.users))
        graph.output(copies[value])
    names = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
    constants = {str(node.target): getattr(called, str(node.target)) for node in nodes if node.op == "get_attr"}
    modules = {name: called.get_submodule(name) for name in names}
    replay = fx.GraphModule({**modules, **constants}, graph)
    members = {prefix + name.removeprefix("module."): module for name, module in modules.items()}
    return Piece(members, replay.forward)


def _try(module: nn.Module, call: Callable[[nn.Module, Tensor], Any], pieces: Sequence[Piece], example: Tensor) -> None:
    """Verify on two samples that the pieces in sequence compute the same as the module."""
    inputs: Any = torch.ones((2, *example.shape[1:]), dtype=example.dtype, device=next(module.parameters()).device)
    with refusing("it cannot be tried in pieces"), trial(module):
        before = ModuleState(module)
        expected = call(module, inputs)
        before.restore()  # or the pieces would count on from there
        for piece in pieces:
            if not (isinstance(inputs, Tensor) and inputs.shape[:1] == (2,)):
                raise NoChain("it passes on something other than a tensor with the samples first")
            inputs = piece(inputs)
    alike = isinstance(expected, Tensor) and isinstance(inputs, Tensor) and expected.shape == inputs.shape
    if not alike or not (expected.is_meta or torch.equal(expected, inputs)):
        raise NoChain("its submodules, called one after the other, compute something else")
