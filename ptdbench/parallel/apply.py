"""What is done to a model, or to each stage of one, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import Model
from ptdbench.parallel.activations import compile_each, recompute
from ptdbench.parallel.batch import Layout
from ptdbench.parallel.batchnorm import synchronize_batchnorm
from ptdbench.parallel.dims import Mesh
from ptdbench.parallel.engine import Part
from ptdbench.parallel.precision import Name, autocast_forward
from ptdbench.parallel.replicate import Replication, replicate
from ptdbench.parallel.shard import Sharding, shard


@dataclass(frozen=True)
class Setting:
    """Where and how a model is laid out.

    Attributes:
        mesh: The ranks as a grid.
        layout: How the batch falls onto them.
        device: This rank's device.
        precision: Format of the arithmetic.
        compile: Whether the layers are compiled.
        activation_checkpointing: ``full``: layers keep only their inputs and are run again in the backward pass.
        seed: What the weights are drawn from.
        channels_last: Whether images come with their channels last in memory.
    """

    mesh: Mesh
    layout: Layout
    device: torch.device
    precision: Name = "fp32"
    compile: bool = False
    activation_checkpointing: Literal["none", "full"] = "none"
    seed: int = 0
    channels_last: bool = False


@dataclass(frozen=True)
class Transforms:
    """Which of the transforms are applied that depend on the degrees.

    Attributes:
        sharding: Options of sharding, where weights are sharded.
        replication: Options of replication, where whole weights are replicated.
        sync_batchnorm: Whether batch norms normalize over the global batch.
    """

    sharding: Sharding | None = None
    replication: Replication | None = None
    sync_batchnorm: bool = False


def apply(model: Model, module: nn.Module, setting: Setting, transforms: Transforms) -> Part:
    """Lay out ``module``, which is the model or a stage of it; both are on the meta device, or have their weights."""
    inside = set(module.modules())
    layers = [layer for layer in model.layers() if layer in inside]
    device = setting.device

    def fill(part: nn.Module, prefix: str = "") -> None:
        materialize(model, part, prefix=prefix, device=device, seed=setting.seed)

    # First what changes the modules that a layer is made of: all that follows wraps them.
    if transforms.sync_batchnorm:
        synchronize_batchnorm(module, setting.mesh.batch.get_group(), device)
    # Before the compiler, so that it sees what is recomputed and can choose what to keep.
    if setting.activation_checkpointing == "full":
        recompute(layers)
    # Before FSDP and DDP: their hooks communicate between the compiled graphs.
    if setting.compile:
        compile_each(layers)
    # Gathers weights in the format of the arithmetic, so that no autocast is needed. Shards have to be contiguous.
    if transforms.sharding:
        return shard(module, layers, setting.mesh.shard, transforms.sharding, fill)
    fill(module)
    # Kernels lie in memory as the images do, or their gradients would come in another order than DDP's buckets have.
    # The messages of a pipeline are contiguous.
    if setting.channels_last and setting.layout.dims.pipeline == 1:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # On the stage and not around a schedule, so that activations travel in the narrow format.
    autocast_forward(module, setting.precision, device.type)
    # Last: DDP's hooks must see the parameters' own gradients, not the compiler's or a checkpoint's.
    if transforms.replication:
        return replicate(module, setting.mesh.batch, device, transforms.replication)
    return Part(module, module)
