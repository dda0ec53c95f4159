"""The local shard of a tensor that is distributed over ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor itself, or this rank's shard of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distributed_like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return this rank's ``part`` itself, or as a DTensor with the shape and placements of ``tensor`` if it is one."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.size(), stride=tensor.stride())


def unwrapped(tensor: Tensor) -> Tensor:
    """Return a tensor, detached and sharing its memory, without the wrapper that makes FSDP all-gather it in fp8."""
    tensor = tensor.detach()
    if not hasattr(shard := local_part(tensor), "fsdp_pre_all_gather"):
        return tensor
    (name, *_), _ = shard.__tensor_flatten__()  # type: ignore[attr-defined]
    return distributed_like(tensor, getattr(shard, name))


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that holds each element once, and can be written to; any other as it is."""
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory of one: a DTensor or a sparse gradient has none itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    elif isinstance(tensor, Tensor) and tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif isinstance(tensor, Tensor) and tensor.layout == torch.strided:
        yield tensor


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, even if its shards are in host memory."""
    weight = next(module.parameters())
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device
