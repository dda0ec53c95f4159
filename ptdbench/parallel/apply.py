"""The ordered transforms of a model or of each of its stages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from ptdbench.kernels.batchnorm import synchronize_batchnorm
from ptdbench.kernels.copies import Copies, enable_wide_gradients
from ptdbench.kernels.linear_cross_entropy import fuse_heads
from ptdbench.models.experts import Router
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import Model, wrap_forward
from ptdbench.parallel import context, experts, precision, tensor
from ptdbench.parallel.compile import compile_parts, parts_outside_layers
from ptdbench.parallel.engine import LaidOutModule
from ptdbench.parallel.fsdp import shard
from ptdbench.parallel.options import Options, Setting
from ptdbench.parallel.precision import DTYPES, cast_inputs
from ptdbench.parallel.replicas import replicate


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
    fill = partial(materialize, model, device=setting.device, seed=setting.seed, placed=_placed)
    # First replace modules inside layers: all later transforms wrap them.
    _replace_modules(module, layers, setting, options)
    if ranks := setting.mesh["cp"]:
        context.exchange(model, module, ranks, options.context_method)
    # Before anything wraps or reads the weights: both transforms replace them, tensor parallelism those that remain.
    shared = experts.modules(model, module) if dims.expert > 1 else []
    if ranks := setting.mesh["ep"]:
        experts.divide(shared, ranks, virtual=setting.virtual)
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
        part = shard(module, layers, parts, setting, options, fill, shared)
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
        part = replicate(module, setting, options)
    return _completed(part, shared, setting, options, copies)


def _replace_modules(module: nn.Module, layers: Sequence[nn.Module], setting: Setting, options: Options) -> None:
    """Replace batch norms and heads of a module, and linear layers of its layers, by those of the setting."""
    dims = setting.layout.dims
    if options.sync_batchnorm and (options.shards(dims) or options.replicates(dims)):
        synchronize_batchnorm(module, setting.mesh.dp.get_group(), setting.device)
    if setting.kernels == "fused":
        fuse_heads(module)
    if setting.precision in precision.FP8_RECIPES:
        rows = setting.layout.micro_batch * setting.positions // dims.context
        precision.convert_to_fp8(layers, setting.precision, sharded=options.shards(dims), rows=rows)


def _narrowed(module: nn.Module, units: Sequence[nn.Module], setting: Setting, options: Options) -> Copies | None:
    """Let a module with whole weights compute in a narrow format, with casts in each pass or with :class:`Copies`."""
    dtype, dims = DTYPES[setting.precision], setting.layout.dims
    if setting.kernels == "torch":
        wrap_forward(module, torch.autocast(setting.device.type, dtype))
        return None
    waits = not (options.replicates(dims) or options.splits_backward(dims))
    return Copies(module, units, dtype, vectors_wait=waits)


def _placed(meta: Tensor, values: Tensor) -> Tensor:
    """Return this rank's part of initial values, as FSDP gathers it."""
    return precision.wrapped_like(meta, tensor.placed(meta, values))


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
    if precision.gathers_fp8(setting.precision, sharded=options.shards(dims)):
        begins.append(lambda _: precision.agree_on_scales(part.module))
        settles.append(partial(precision.forget_scales, part.module))
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
