"""FSDP2: shards weights, gradients and optimizer state; gathers each layer just before it runs."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import _BatchNorm

from ptdbench.parallel.compile import parts_outside_layers
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.engine import LaidOutModule
from ptdbench.parallel.experts import SHARDED
from ptdbench.parallel.options import Options, Setting
from ptdbench.parallel.precision import DTYPES


def shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    parts: Sequence[nn.Module],
    setting: Setting,
    options: Options,
    fill: Callable[..., None],
    experts: Collection[nn.Module],
) -> LaidOutModule:
    """Shard a module over the ranks, layer by layer.

    Args:
        module: A model, or a stage of one, on the meta device or with its weights.
        layers: Its repeated modules, in order; each is gathered separately.
        parts: The parts of the whole model in order, if it is a chain of parts.
        setting: The ranks and formats; ``kernels=torch``: a group for each layer and one for the rest, under torch's
            default policies.
        options: The options of the layout.
        fill: Materializes a module, given the ``prefix`` of its names in ``module``.
        experts: Modules of experts that ranks share.
    """
    mesh, dims, dtype = setting.mesh, setting.layout.dims, DTYPES[setting.precision]
    reduce_dtype = DTYPES[options.sent]  # FSDP also accumulates whole gradients of micro-batches in it
    # Inputs are cast by precision.cast_inputs(), as under every layout.
    wide = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    is_narrow, is_fused = dtype != torch.float32, setting.kernels == "fused"
    policy = replace(wide, param_dtype=dtype, cast_forward_inputs=not is_fused) if is_narrow else wide
    on_host = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type != "cpu")
    offload = OffloadPolicy() if setting.offload == "none" else on_host
    group = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    cut = partial(_cut, group, wide if is_narrow else None, experts, mesh.ep_fsdp)
    names = {part: name for name, part in module.named_modules()}
    tables, head = _around(module, layers, parts) if is_fused else ([], [])
    frees = options.frees_after_forward(dims)
    if not is_fused and not options.applies("pipeline", dims):
        frees = options.reshard_after_forward  # on a single rank, too
    # The backward pass begins with the head and the last layer: gathering them again would be exposed. Embedding tables
    # are read in the forward pass only; they stay between passes that keep the other weights.
    freed: dict[nn.Module, bool | int] = dict.fromkeys(tables, bool(frees) and dims.pipeline == 1)
    freed |= dict.fromkeys(layers, frees)
    if is_fused:
        freed |= dict.fromkeys([*layers[-1:], *head], False)
    # Materialize and shard one group at a time, so that at most one is whole in memory.
    groups: dict[nn.Module, FSDPModule] = {}
    for unit, is_freed in freed.items():
        fill(unit, prefix=f"{names[unit]}.")
        groups[unit] = cut(unit, is_freed)
    for table in tables:
        groups[table].set_unshard_in_backward(False)
    # The remaining weights are gathered first and freed last.
    fill(module)
    root = cut(module, False)
    for part in (*tables, *([] if is_fused else [root])) if dims.tensor > 1 else ():
        # Rows, or torch's loss, come from a DTensor; autograd refuses in-place writes to views of it anyway.
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({type(part).__name__}\) returned a view")
    if options.prefetch > 1:  # torch's default is to gather one ahead
        _prefetch([*dict.fromkeys([root, *groups.values()])], [groups[layer] for layer in layers[:-1]], options)
    return LaidOutModule(module, module, partial(_deferred, root, options, dims), release=partial(_reshard, module))


def _cut(
    group: Callable[..., FSDPModule],
    of_norms: MixedPrecisionPolicy | None,
    experts: Collection[nn.Module],
    copies: DeviceMesh,
    part: nn.Module,
    frees: bool | int,
) -> FSDPModule:
    """Shard a part; ``of_norms``: the policy of its batch norms, if they are separate groups."""
    # Otherwise their weights would be gathered in another dtype than their statistics have.
    for norm in part.modules() if of_norms else ():
        if isinstance(norm, _BatchNorm) and not isinstance(norm, FSDPModule) and norm is not part:
            group(norm, mp_policy=of_norms, reshard_after_forward=frees)
    # Shard experts over the ranks with copies of them, by rows: a rank has too few experts to divide by expert.
    for inner in part.modules():
        if inner in experts and not isinstance(inner, FSDPModule):
            group(inner, reshard_after_forward=bool(frees), mesh=copies, shard_placement_fn=lambda _: Shard(SHARDED))
    return part if isinstance(part, FSDPModule) else group(part, reshard_after_forward=frees)


@contextmanager
def _deferred(root: FSDPModule, options: Options, dims: Dims) -> Iterator[None]:
    # If each micro-batch is reduce-scattered, only the all-reduce between replicas is left for the end.
    in_shards = options.reduce_scatter_each_microbatch
    set_synced = root.set_requires_all_reduce if in_shards else root.set_requires_gradient_sync
    set_synced(False)
    root.set_reshard_after_backward(bool(options.frees_after_forward(dims)))
    try:
        yield
    finally:
        set_synced(True)
        root.set_reshard_after_backward(True)


def _around(
    module: nn.Module, layers: Sequence[nn.Module], parts: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the parts around the layers that can be gathered separately, as no other module shares their weights.

    First the parts of embedding tables only, which a backward pass does not need; then the head, as a list.
    """
    if not layers:
        return [], []
    holders = Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))
    unshared = [
        part
        for part in parts_outside_layers(module, layers, parts)
        if all(holders[weight] == 1 for weight in part.parameters())
    ]

    def looks_up(part: nn.Module) -> bool:
        holders = (inner for inner in part.modules() if next(inner.parameters(recurse=False), None) is not None)
        return all(
            type(holder).forward is nn.Embedding.forward and set(holder._parameters) == {"weight"} for holder in holders
        )

    return [*filter(looks_up, unshared)], [part for part in unshared if part is parts[-1] and not looks_up(part)]


def _prefetch(groups: Sequence[FSDPModule], freed: Collection[FSDPModule], options: Options) -> None:
    """Let each group of weights prefetch the next ones, in both passes; ``freed``: gathered again for the backward.

    Groups are in the order of the forward pass; the root may hold weights that the backward pass needs first.
    """
    for number, group in enumerate(groups):
        group.set_modules_to_forward_prefetch([*groups[number + 1 : number + 1 + options.prefetch]])
    root, *others = groups
    backward = [root, *reversed(others)]
    for number, group in enumerate(backward):
        ahead = [later for later in backward[number + 1 :] if later in freed]
        group.set_modules_to_backward_prefetch(ahead[: options.prefetch])


def _reshard(module: nn.Module) -> None:
    """Free all gathered weights, as a backward pass does, or the next step or checkpoint would use stale ones."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
