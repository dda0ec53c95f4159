"""Tensor parallelism: the ranks of a group share each matrix product, by torch's ``parallelize_module``.

All parameters become DTensors over the group, including replicated ones, so that an optimizer never meets both kinds.
Modules without a role compute on their local tensors, which are the same on all ranks.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ptdbench.grouping import grouped
from ptdbench.kernels.linear_cross_entropy import LinearCrossEntropy
from ptdbench.kernels.softmax import VocabularyShare
from ptdbench.models.experts import Router
from ptdbench.models.protocol import Model, module_of, roles_of, wrap_forward

#: The dimension of ``[batch, length, ...]`` that sequence parallelism shards outside split layers.
POSITIONS = 1

#: The dimension of a weight that each kind of role splits.
DIMENSIONS = {
    **dict.fromkeys(("colwise", "local_colwise", "colwise_gather_output", "vocabulary"), 0),
    **dict.fromkeys(("rowwise", "rowwise_split_input"), 1),
}


def split_dimensions(model: Model) -> dict[nn.Parameter, int]:
    """Return the dimension along which each split parameter is split; the bias of a row-wise layer is not."""
    dimensions = {}
    for name, role in roles_of(model).items():
        dimension = DIMENSIONS.get(role.kind)
        if dimension is not None:
            parameters = module_of(model).get_submodule(name).parameters()
            dimensions.update({parameter: dimension for parameter in parameters if parameter.dim() > dimension})
    return dimensions


def parallelize(model: Model, module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split the matrix products of ``module``, the model or one of its stages, over the ranks of a 1-D ``mesh``.

    ``module`` is on the meta device, or has the same values on all ranks. ``sequence``: whether positions are sharded
    between split layers.
    """
    names = dict(module.named_modules())
    losses = [names[name] for name, role in roles_of(model).items() if role.kind == "loss" and name in names]
    splits_logits = any(not isinstance(loss, LinearCrossEntropy) for loss in losses)
    by_kind = styles(sequence, splits_logits=splits_logits)
    same = grouped((weight, name) for name, weight in module.named_parameters(remove_duplicate=False))
    roles = {name: role for name, role in roles_of(model).items() if name in names and role.kind in by_kind}
    parallelize_module(module, mesh, {name: by_kind[role.kind] for name, role in roles.items()}, src_data_rank=None)
    for part in module.modules():
        spread(part, mesh, Replicate(), Replicate())
    _tie(module, same)
    if splits_logits:  # the loss is a DTensor, and so are logits without targets
        module.register_forward_hook(lambda _, __, out: out.full_tensor() if isinstance(out, DTensor) else out)


def placed(meta: Tensor, values: Tensor) -> Tensor:
    """Return the initial values that replace a meta tensor; for a DTensor, this rank's part of them."""
    if not isinstance(meta, DTensor):
        return values
    return distribute_tensor(values, meta.device_mesh, meta.placements, src_data_rank=None)


def add_up_partial(parameters: list[nn.Parameter]) -> None:
    """Sum partial gradients over the ranks in one message; FSDP's reduction does so itself."""
    summands = [p for p in parameters if isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements)]
    if not summands:
        return
    gradients = [parameter.grad.to_local() for parameter in summands]  # type: ignore[union-attr]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    mesh = summands[0].grad.device_mesh  # type: ignore[union-attr]
    dist.all_reduce(flat, group=mesh.get_group())
    for parameter, values in zip(summands, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        parameter.grad = DTensor.from_local(values.view(parameter.shape), mesh, [Replicate()], run_check=False)


def styles(sequence: bool, *, splits_logits: bool = False) -> dict[str, ParallelStyle]:
    """Return the parallel style for each kind of role; modules with other roles stay as they are.

    ``splits_logits``: logits stay split by tokens, for a loss under torch's ``loss_parallel``.
    """
    shared = Shard(POSITIONS) if sequence else Replicate()
    scatter = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=shared)
    logits: Placement = Shard(-1) if splits_logits else Replicate()
    return {
        "colwise": ColwiseParallel(),
        "local_colwise": _LocalColwise(),
        "rowwise": RowwiseParallel(output_layouts=shared),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate(), output_layouts=shared),
        "vocabulary": _Vocabulary(output_layouts=logits, use_local_output=not splits_logits),
        "loss": _LossOverVocabulary(),
        "sequence": _Sequence(output_layouts=shared, desired_output_layouts=Replicate(), use_local_output=False),
        "replicated": _Replicated(),
        "split_sequence": _SplitSequence(sequence),
        **({"scatter": scatter} if sequence else {}),
    }


class _Sequence(PrepareModuleOutput):
    """The style of a module whose output goes to split layers; its gradient is summed once for all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # With sharded positions, a rank computes only a summand of the gradient of the module's own weights.
        of_gradient = Partial() if isinstance(self.output_layouts[0], Shard) else Replicate()
        for part in module.modules():
            spread(part, device_mesh, Replicate(), of_gradient)
        return super()._apply(module, device_mesh)


class _Replicated(ParallelStyle):
    """The style of a module applied to each unit: a rank has its units' summands of the gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            spread(part, device_mesh, Replicate(), Partial())
        module.register_forward_pre_hook(self._localize)
        return module

    @staticmethod
    def _localize(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace outputs of a sequence-parallel module, which sums their gradients, by local tensors."""
        summand = [Partial()]
        return tuple(
            argument.to_local(grad_placements=summand) if isinstance(argument, DTensor) else argument
            for argument in arguments
        )


class _LocalColwise(ParallelStyle):
    """The style of a layer whose outputs are split over ranks, each with its summand of the input gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        spread(module, device_mesh, Shard(0), Shard(0))
        return module


class _SplitSequence(_Replicated):
    """The style of a module applied to a rank's share of the positions, with or without sequence parallelism."""

    def __init__(self, sequence: bool) -> None:
        self._sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()

        def number_all(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return (torch.arange(len(arguments[0]) * ranks, device=arguments[0].device),)

        for router in (part for part in module.modules() if isinstance(part, Router)):
            # Before the hook of context parallelism, which numbers the positions of all these ranks.
            router.positions.register_forward_pre_hook(number_all, prepend=True)
            router.positions.register_forward_hook(lambda _, __, positions: positions.tensor_split(ranks)[rank])
        if not self._sequence:
            wrap_forward(module, partial(self._on_share, device_mesh))
        return super()._apply(module, device_mesh)

    @staticmethod
    def _on_share(mesh: DeviceMesh, run: Callable[[Tensor], Tensor]) -> Any:
        def forward(x: Tensor) -> Tensor:
            share = _redistributed(x, mesh, Replicate(), Shard(POSITIONS)).to_local()
            return _redistributed(run(share), mesh, Shard(POSITIONS), Replicate()).to_local()

        return forward


class _Vocabulary(ColwiseParallel):
    """The style of a vocabulary: each rank computes the logits of some tokens, or looks up its embedding rows.

    The backward pass of torch's ``RowwiseParallel`` would create the gradient of all rows on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        spread(module, device_mesh, Shard(0), Shard(0))
        if module.padding_idx is not None:  # the row here whose gradient is omitted, if it is here
            row = module.padding_idx - device_mesh.get_local_rank() * len(module.weight)
            module.padding_idx = row if 0 <= row < len(module.weight) else None
        wrap_forward(module, partial(self._look_up_own, module, device_mesh))
        return module

    @staticmethod
    def _look_up_own(module: nn.Embedding, mesh: DeviceMesh, look_up: Callable[[Tensor], Tensor]) -> Any:
        def forward(tokens: Tensor) -> Tensor:
            rows = len(module.weight)
            row = tokens - mesh.get_local_rank() * rows
            is_here = (row >= 0) & (row < rows)
            rows_here = look_up(row.where(is_here, 0)).where(is_here.unsqueeze(-1), 0)
            return _redistributed(rows_here, mesh, Partial(), Replicate()).to_local()

        return forward


class _LossOverVocabulary(ParallelStyle):
    """The style of a loss over a split vocabulary: ours, from local tensors, or torch's by ``loss_parallel``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, LinearCrossEntropy):
            module.register_forward_pre_hook(partial(self._localize, device_mesh))
        else:
            wrap_forward(module, torch.compiler.disable)  # a graph would not have the operations of loss_parallel
        return module

    @staticmethod
    def _localize(mesh: DeviceMesh, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *rest = arguments
        local = weight.to_local()
        module.share = VocabularyShare(  # type: ignore[assignment]
            first=mesh.get_local_rank() * len(local),
            total=partial(_over_ranks, mesh=mesh, reduction="sum"),
            maximum=partial(_over_ranks, mesh=mesh, reduction="max"),
        )
        originals = [None if weight is None else weight.to_local() for weight in rest]
        return hidden.to_local(grad_placements=[Partial()]), local, targets, *originals


def _over_ranks(tensor: Tensor, mesh: DeviceMesh, reduction: str) -> Tensor:
    return DTensor.from_local(tensor, mesh, [Partial(reduction)], run_check=False).full_tensor()


def _redistributed(local: Tensor, mesh: DeviceMesh, placement: Placement, target: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False).redistribute(mesh, [target])


def spread(part: nn.Module, mesh: DeviceMesh, placement: Placement, of_gradient: Placement) -> None:
    """Turn a module's own plain parameters into DTensors, which the module still reads as plain tensors."""
    plain = {name: weight for name, weight in part.named_parameters(recurse=False) if not isinstance(weight, DTensor)}
    for name, weight in plain.items():
        spread = distribute_tensor(weight.data, mesh, [placement], src_data_rank=None)
        part.register_parameter(name, nn.Parameter(spread, weight.requires_grad))
    if plain:
        part.__class__ = _reading(type(part), tuple(plain), of_gradient)  # type: ignore[assignment, arg-type]


@cache
def _reading(kind: type[nn.Module], names: tuple[str, ...], of_gradient: Placement) -> type[nn.Module]:
    """Return a subclass that reads the local tensors of some weights; equal modules share it and its compiled graphs.

    Attributes of these names are properties, as in torchtitan's SimpleFSDP. A replacement set on the instance takes
    precedence over the weight, see :class:`ptdbench.kernels.copies.Copies`.
    """

    def attribute(name: str) -> property:
        return property(lambda self: _local_part(self.__dict__.get(name, self._parameters[name]), of_gradient))

    attributes: dict[str, Any] = {name: attribute(name) for name in names}
    if issubclass(kind, nn.RNNBase):  # computes with a list of its weights
        ordered = property(lambda self: [getattr(self, name) for name in self._flat_weights_names], lambda *_: None)
        attributes["_flat_weights"] = ordered
    return type(kind.__name__, (kind,), {**attributes, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _local_part(weight: Tensor, of_gradient: Placement) -> Tensor:
    """Return the local tensor of a DTensor.

    Shards on a two-dimensional mesh are returned as they are: FSDP reads the attributes to manage its shards.
    """
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim > 1:
        return weight
    return weight.to_local(grad_placements=[of_gradient])


def _tie(module: nn.Module, same: Mapping[nn.Parameter, list[str]]) -> None:
    """Tie parameters again: each module got its own DTensor."""
    spread = dict(module.named_parameters(remove_duplicate=False))
    for first, *others in same.values():
        for other in others:
            holder, _, leaf = other.rpartition(".")
            module.get_submodule(holder).register_parameter(leaf, spread[first])
