"""FSDP2: weights, gradients and optimizer state are sharded; each layer is gathered just before it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import _BatchNorm

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.engine import LaidOutModule
from ptdbench.parallel.experts import SHARDED
from ptdbench.parallel.options import Options
from ptdbench.parallel.precision import DTYPES, Name


def shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    how: Options,
    dims: Dims,
    fill: Callable[[nn.Module, str], None],
    experts: tuple[Collection[nn.Module], DeviceMesh],
    *,
    precision: Name = "fp32",
    offload: bool = False,
) -> LaidOutModule:
    """Shard a module over the ranks, layer by layer.

    Args:
        module: A model, or a stage of one, on the meta device or with its weights.
        layers: The modules that are gathered separately.
        mesh: The ranks; of two dimensions, the first are copies and the second the shards of each.
        how: The options.
        dims: The degrees.
        fill: Materializes a module, given the prefix of its names in ``module``.
        experts: Modules of experts that ranks share, and the ranks over which each of them is sharded.
        precision: Dtype of the arithmetic.
        offload: Whether weights, gradients and optimizer state are kept in host memory.
    """
    narrow = DTYPES[precision] != torch.float32
    assert how.sent != "powersgd"  # refused
    reduce_dtype = DTYPES[how.sent]
    # Inputs are cast by precision.narrow(), as under every layout.
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision] if narrow else None, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    where = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    of_norms = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)

    def cut(part: nn.Module, reshard_after_forward: bool | int) -> FSDPModule:
        # Batch norms on their own, or their weights would be gathered in another dtype than their statistics.
        for norm in part.modules() if narrow else ():
            if isinstance(norm, _BatchNorm) and not isinstance(norm, FSDPModule) and norm is not part:
                group(norm, of_norms, reshard_after_forward)
        # Experts over the ranks that have copies of them: evenly, and not by expert, as few are here.
        for inner in part.modules():
            if inner in experts[0] and not isinstance(inner, FSDPModule):
                group(inner, policy, bool(reshard_after_forward), experts[1], lambda _: Shard(SHARDED))
        return part if isinstance(part, FSDPModule) else group(part, policy, reshard_after_forward)

    def group(
        part: nn.Module,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int,
        over: DeviceMesh = mesh,
        along: Callable[[nn.Parameter], Shard | None] | None = None,
    ) -> FSDPModule:
        return fully_shard(
            part,
            mesh=over,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=where,
            shard_placement_fn=along,
        )

    names = {part: name for name, part in module.named_modules()}
    # Each layer is materialized and sharded in turn, so that at most one is whole.
    groups = []
    for layer in layers:
        fill(layer, f"{names[layer]}.")
        groups.append(cut(layer, how.frees_after_forward(dims)))
    # The rest, embedding and head, forms one group: it is gathered first and freed last. Not after the forward pass, as
    # the backward pass begins with it.
    fill(module, "")
    root = cut(module, reshard_after_forward=False)
    if how.prefetch > 1:  # torch itself gathers one ahead
        _prefetch([root, *(one for one in groups if one is not root)], how.prefetch)

    @contextmanager
    def deferred() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(how.frees_between_microbatches(dims))
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)

    return LaidOutModule(module, module, deferred, release=lambda: _reshard(module))


def _prefetch(groups: Sequence[FSDPModule], ahead: int) -> None:
    """Let each group of weights, in the order of the forward pass, gather those ahead of it, in both passes.

    The backward pass begins with the first group too: it holds the head.
    """
    root, *layers = groups
    for number, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(list(groups[number + 1 : number + 1 + ahead]))
    for number, group in enumerate([root, *reversed(layers)]):
        group.set_modules_to_backward_prefetch([root, *reversed(layers)][number + 1 : number + 1 + ahead])


def _reshard(module: nn.Module) -> None:
    """Free all gathered weights.

    With ``reshard_after_forward=False`` the backward pass does that. Without a backward pass the next step or
    checkpoint would use stale whole weights.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def shared_between_layers(model: Model) -> tuple[str, str] | None:
    """Two names of one weight in different layers, which cannot be sharded; without layers the module is one layer."""
    layers = set(model.layers())
    units = [f"{name}." for name, part in module_of(model).named_modules() if part in layers]
    first: dict[nn.Parameter, tuple[str, str | None]] = {}
    for name, weight in module_of(model).named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(unit)), None)
        other, other_unit = first.setdefault(weight, (name, unit))
        if unit != other_unit:
            return other, name
    return None
