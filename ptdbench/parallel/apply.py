"""The ordered transforms of a model or of each of its stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from ptdbench.kernels.choice import Kernels
from ptdbench.kernels.copies import Copies
from ptdbench.kernels.enable import enable
from ptdbench.kernels.wide_gradients import enable_wide_gradients
from ptdbench.kernels.wrapping import wrap_forward
from ptdbench.models.experts import Router
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import Model
from ptdbench.parallel import context, experts, fp8, tensor
from ptdbench.parallel.activations import Activations, Keep
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.compile import Compile, compile_parts, parts_outside_layers
from ptdbench.parallel.ddp import replicate
from ptdbench.parallel.engine import LaidOutModule
from ptdbench.parallel.fsdp import shard
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.options import Offload, Options
from ptdbench.parallel.precision import DTYPES, Name, cast_inputs


@dataclass(frozen=True)
class Setting:
    """The ranks, formats and options of laying out a model."""

    mesh: Mesh  #: The mesh of ranks.
    layout: BatchPlan  #: How the batch is split over them.
    device: torch.device  #: This rank's device.
    precision: Name = "fp32"  #: Dtype of the arithmetic.
    kernels: Kernels = "fused"  #: Whose kernels compute, and by which recipe in a narrow format.
    compile: Compile = False  #: What is compiled, see :mod:`ptdbench.parallel.compile`.
    activations: Activations = field(default_factory=Keep)  #: What becomes of activations until the backward pass.
    seed: int = 0  #: Seed of the weights.
    positions: int = 1  #: Tokens per sample; 1 if samples have none.
    channels_last: bool = False  #: Whether images are channels-last in memory.
    offload: Offload = "none"  #: What is kept in host memory between its uses.
    virtual: bool = False  #: Whether the devices are virtual, so that nothing is computed.

    @property
    def owns_loss(self) -> bool:
        """Whether this rank is the first in its tensor-parallel group, whose ranks compute the same loss together."""
        return not (ranks := self.mesh["tp"]) or ranks.get_local_rank() == 0


def apply(model: Model, module: nn.Module, setting: Setting, options: Options) -> LaidOutModule:
    """Lay out ``module``: the model or one of its stages, on the meta device or with its weights."""
    dims = setting.layout.dims
    is_sharded, is_replicated = options.shards(dims), options.replicates(dims)
    inside = set(module.modules())
    layers = [layer for layer in model.layers() if layer in inside]
    is_narrow = DTYPES[setting.precision] != torch.float32
    # Before any transform, and only if the parts matter: for a user's own module, finding them takes a trace.
    needs_parts = setting.compile or is_narrow or is_sharded
    parts = list((model.parts() or {}).values()) if needs_parts else []
    device, fill = setting.device, partial(_fill, model, setting)
    # First replace modules inside layers: all later transforms wrap them.
    synchronized = setting.mesh.dp.get_group() if options.sync_batchnorm and (is_sharded or is_replicated) else None
    enable(module, setting.kernels, synchronized, device)
    if setting.precision in fp8.RECIPES:
        rows = setting.layout.micro_batch * setting.positions // dims.context
        fp8.convert(layers, setting.precision, sharded=is_sharded, rows=rows)
    if ranks := setting.mesh["cp"]:
        context.exchange(model, module, ranks, options.context_method)
    # Before anything wraps or reads the weights: both transforms replace them, tensor parallelism those that remain.
    shared = experts.modules(model, module) if dims.expert > 1 else []
    if ranks := setting.mesh["ep"]:
        experts.divide(shared, ranks, virtual=setting.virtual)
    if setting.virtual:
        experts.force(module)
    if ranks := setting.mesh["tp"]:
        tensor.parallelize(model, module, ranks, sequence=options.sequence)
    if is_narrow and setting.kernels == "fused":
        # Before layers are wrapped, as some are linear themselves.
        if not options.splits_backward(dims):
            enable_wide_gradients(module, gathered=is_sharded)
        # Inside recomputation, which repeats casts instead of keeping their results, and compilation, which fuses them.
        cast_inputs(module, layers, setting.precision)
    # Recomputation before compilation: the compiler sees it and can choose what to keep.
    if not setting.activations.after_compilation:
        setting.activations(layers)
    # Before FSDP and DDP: their hooks communicate between the compiled graphs.
    compile_parts(module, layers, parts, setting.compile)
    if setting.activations.after_compilation:
        setting.activations(layers)
    # FSDP gathers weights in the compute dtype. Shards must be contiguous.
    if is_sharded:
        formats: Any = {"precision": setting.precision, "kernels": setting.kernels}
        offload = setting.offload != "none"
        part = shard(module, layers, parts, setting.mesh, options, dims, fill, shared, offload=offload, **formats)
        return _completed(part, shared, setting, options, None)
    # Outside all of these, as casts are neither traced nor recomputed.
    units = [] if setting.compile == "whole" else [*layers, *parts_outside_layers(module, layers, parts)]
    copies = _narrowed(module, units, setting, options) if is_narrow else None
    fill(module)
    # Convolution kernels take the images' memory format; otherwise their gradients would not match DDP's buckets.
    # Pipeline messages, however, must be contiguous.
    if setting.channels_last and dims.pipeline == 1:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    part = LaidOutModule(module, module)
    # Last: DDP's hooks must see the parameters' own gradients, not the compiler's or a checkpoint's.
    if is_replicated:
        static_graph = options.has_static_graph(setting.layout)
        part = replicate(module, setting.mesh.dp_cp, device, options, static_graph=static_graph)
    return _completed(part, shared, setting, options, copies)


def _narrowed(module: nn.Module, units: Sequence[nn.Module], setting: Setting, options: Options) -> Copies | None:
    """Let a module with whole weights compute in a narrow format, with casts in each pass or with :class:`Copies`."""
    dtype, dims = DTYPES[setting.precision], setting.layout.dims
    if setting.kernels == "torch":
        wrap_forward(module, torch.autocast(setting.device.type, dtype))
        return None
    waits = not (options.replicates(dims) or options.splits_backward(dims))
    return Copies(module, units, dtype, vectors_wait=waits)


def _fill(model: Model, setting: Setting, part: nn.Module, prefix: str = "") -> None:
    """Materialize a part, given the prefix of its names; tensors keep this rank's part of the initial values."""

    def placed(meta: Tensor, values: Tensor) -> Tensor:
        return fp8.wrapped_as(meta, tensor.placed(meta, values))

    materialize(model, part, prefix=prefix, device=setting.device, seed=setting.seed, placed=placed)


def _completed(
    part: LaidOutModule, shared: Sequence[nn.Module], setting: Setting, options: Options, copies: Copies | None
) -> LaidOutModule:
    """Add what runs at the start of a step, and what completes the gradients where FSDP and DDP do not."""
    dims, routing = setting.layout.dims, None
    begins: list[Callable[[Tensor], None]] = []
    settles: list[Callable[[], None]] = [part.settle]
    if copies:
        begins.append(copies.begin)
        settles.append(copies.end)
    if fp8.is_gathered(setting.precision, sharded=options.shards(dims)):
        begins.append(lambda _: fp8.agree(part.module))
        settles.append(partial(fp8.forget, part.module))
    if dims.tensor > 1:
        settles.append(partial(tensor.add_up_partial, list(part.module.parameters())))
        part = replace(part, around=loss_parallel)  # for losses that are not ours
    if shared or any(isinstance(inner, Router) for inner in part.module.modules()):
        routing = experts.Routing(part.module, shared, setting.mesh, setting.layout)
        begins.append(routing.begin)
        settles.append(routing.settle)
    begin, settle = partial(_call_each, begins), partial(_call_each, settles)
    return replace(part, begin=begin, settle=settle, routing=routing, copies=copies)


def _call_each(functions: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for function in functions:
        function(*arguments)
