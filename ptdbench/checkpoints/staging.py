"""Copies of tensors in host memory, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Copies tensors into memory that is kept from one call to the next: to allocate it takes longer than to copy."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, by name; a DTensor's is a DTensor. They are overwritten by the next call."""
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
        # Pinned, so that the GPU copies by itself and at full speed.
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _shape(tensor: Tensor) -> object:
    """What makes memory for one tensor fit another."""
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.size(), tensor.stride(), tensor.dtype, spread


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
