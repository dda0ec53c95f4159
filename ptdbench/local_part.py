"""The local part of a tensor that ranks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """A tensor itself, or the shard that this rank has of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; its shards may be in host memory all the same."""
    weight = next(module.parameters())
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device
