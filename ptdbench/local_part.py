"""The local shard of a tensor that is distributed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor itself, or this rank's shard of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Return a tensor, detached and sharing its memory, without the wrapper that makes FSDP all-gather it in fp8."""
    tensor = tensor.detach()
    if not hasattr(shard := local_part(tensor), "fsdp_pre_all_gather"):
        return tensor
    assert isinstance(tensor, DTensor)
    (name, *_), _ = shard.__tensor_flatten__()  # type: ignore[attr-defined]
    mesh, placements, size = tensor.device_mesh, tensor.placements, tensor.size()
    local = getattr(shard, name)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=tensor.stride())


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, even if its shards are in host memory."""
    weight = next(module.parameters())
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device
