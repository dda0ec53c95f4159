"""Copies of tensors in host memory, so that training can continue while they are written."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch.cuda import _pin_memory_utils
from torch.distributed.tensor import DTensor

from ptdbench.local_part import local_part

#: Each copy starts at a multiple of so many bytes, as torch's own tensors on the CPU do.
_ALIGNMENT = 64


class Staging:
    """Copies tensors into memory that is reused between calls: allocating takes longer than copying.

    The memory is one block of the size that is needed. For a GPU it is registered with the driver (pinned), so that
    copies are asynchronous and at full speed. torch's allocator of pinned memory would round each tensor up to a power
    of two, and keep the memory when the tensors are gone.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, object] = {}
        self._copies: dict[str, Tensor] = {}
        self._unpin: Callable[[], object] = lambda: None

    def __call__(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Start copying; steps that the device is given from now on do not change the copies.

        Returns:
            A function that waits for the device and returns the copies by name, on the CPU; a DTensor stays a DTensor.
            The next call overwrites them.
        """
        on_gpu = _on_gpu(tensors)
        self._allocate(tensors, pinned=on_gpu)
        copies = dict(self._copies)
        with torch.no_grad():
            for name, tensor in tensors.items():
                local_part(copies[name]).copy_(local_part(tensor), non_blocking=True)
        if not on_gpu:
            return lambda: copies
        # In the stream of the steps: the next step comes after the copies, without making the host wait.
        copied = torch.cuda.Event()
        copied.record()

        def when_copied() -> dict[str, Tensor]:
            copied.synchronize()
            return copies

        return when_copied

    def close(self) -> None:
        """Release the memory."""
        self._unpin()
        self._shapes, self._copies = {}, {}

    def _allocate(self, tensors: Mapping[str, Tensor], pinned: bool) -> None:
        """Allocate memory for copies of ``tensors``, unless there is."""
        shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
        if shapes == self._shapes:
            return
        self.close()
        sizes = [-(-local_part(tensor).nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
        memory = mmap.mmap(-1, max(sum(sizes), 1))  # shared: a process that is forked does not cause copies of pages
        if pinned:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            _pin_memory_utils.pin_memory(address, len(memory))
            # Also without close(), as after a failed run: what is unmapped while registered could not be used again.
            self._unpin = weakref.finalize(self, _unpin, address, memory)
        starts = accumulate(sizes, initial=0)
        self._copies = {
            name: _placed(tensor, memory, start) for (name, tensor), start in zip(tensors.items(), starts, strict=False)
        }
        self._shapes = shapes


def _on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values())


def _unpin(address: int, _: mmap.mmap) -> None:
    """Unregister memory, which exists for as long as it is an argument of this function's finalizer."""
    _pin_memory_utils.unpin_memory(address)


def _placed(tensor: Tensor, memory: mmap.mmap, start: int) -> Tensor:
    """A tensor like ``tensor`` on the CPU, in ``memory`` from byte ``start``."""
    local = local_part(tensor)
    like = torch.empty_like(local, device="meta")  # its strides leave no gaps
    count = local.numel()
    # With a storage of its own: of a view, the whole memory would be written.
    flat = (
        torch.frombuffer(memory, dtype=local.dtype, count=count, offset=start)
        if count
        else local.new_empty(0, device="cpu")
    )
    copy = flat.as_strided(like.size(), like.stride())
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def _shape(tensor: Tensor) -> object:
    """What must be equal for memory to be reused for another tensor."""
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.size(), tensor.stride(), tensor.dtype, spread
