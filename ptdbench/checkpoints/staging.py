"""Copies of tensors in host memory, so that training can continue while they are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Copies tensors into memory that is reused between calls: allocating takes longer than copying."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, by name; a DTensor stays a DTensor. The next call overwrites them."""
        self._copies = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                _local(self._copies[name]).copy_(_local(tensor), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._copies)

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        old = self._copies.get(name)
        if old is not None and _shape(old) == _shape(tensor):
            return old
        # Pinned, so that the copy is asynchronous and at full speed.
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _shape(tensor: Tensor) -> object:
    """What must be equal for memory to be reused for another tensor."""
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.size(), tensor.stride(), tensor.dtype, spread


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
