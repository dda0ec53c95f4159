"""The part of a tensor that is on this rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """A tensor itself, or the shard that this rank has of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
