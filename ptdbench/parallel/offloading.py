"""Activation offloading: saved tensors are copied to the host during the forward pass, and back during the backward.

A GPU copies in two streams, one per direction. While it computes a layer, in either pass, the device holds the saved
tensors of that layer, in use, and of the layer before it, in flight. All copies but the first of a backward pass
therefore overlap with compute, if computing a layer takes at least as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ptdbench.local_part import plain_tensors


class Offloading:
    """Offloads the saved tensors of the layers of a model, or of one of its stages."""

    def __init__(self) -> None:
        self._latest: _Run | None = None
        self._on_device: list[_Run] = []

    def of_layer(self, layer: nn.Module, is_first: bool, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward`` of a layer, the first one or not, to offload its saved tensors."""

        @wraps(forward)
        def run(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            current = self._latest = _Run(layer, None if is_first else self._latest, self.begin)
            self.begin(current)
            with saved_tensors_hooks(current.pack, lambda fetch: fetch()):
                return forward(*arguments, **named)

        return run

    def begin(self, run: _Run) -> None:
        """Begin or continue a pass of a run; other saved tensors leave the device."""
        stay = [active for active in (run, run.before) if active is not None]
        for other in self._on_device:
            if other not in stay:
                other.leave()
        self._on_device = stay


class _Run:
    """The saved tensors of one forward pass of a layer; ``begin`` is called before each use."""

    def __init__(self, layer: nn.Module, before: _Run | None, begin: Callable[[_Run], None]) -> None:
        self._layer = layer
        self.before = before  #: The pass of the previous layer, whose backward pass comes next.
        self._begin = begin
        self._copies: dict[object, _Copy] = {}  #: By storage, which a copy keeps alive during the pass.

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that fetches a saved tensor; weights, their narrow copies, and views of these stay.

        :class:`torch.autograd.graph.save_on_cpu` would move weights too.
        """
        whole = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if _is_copy(whole) or self._is_of_weight(tensor):
            return tensor.detach
        if isinstance(tensor, DTensor):
            local, mesh, placements = self._offload(tensor.to_local()), tensor.device_mesh, tensor.placements
            size, stride = tensor.size(), tensor.stride()
            return lambda: DTensor.from_local(local(), mesh, placements, run_check=False, shape=size, stride=stride)
        return self._offload(tensor.detach())

    def _is_of_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a parameter; FSDP frees a gathered one before a copy ends."""
        storages = {plain.untyped_storage()._cdata for plain in plain_tensors(tensor)}
        parts = (plain for weight in self._layer.parameters() for plain in plain_tensors(weight))
        return any(plain.untyped_storage()._cdata in storages for plain in parts)

    def leave(self) -> None:
        """Free the device memory of the saved tensors, once they are copied."""
        for copy in self._copies.values():
            copy.leave()

    def prefetch(self) -> None:
        for copy in self._copies.values():
            copy.prefetch()

    def _offload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that fetches a tensor with its original strides, which compiled graphs rely on.

        Tensors that fill their storage share one copy: attention and the next product, say, save the same numbers in
        two shapes.
        """
        size, strides, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        part = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]  # without repetitions
        storage, count = tensor.untyped_storage(), part.numel()
        if fills := count > 0 and storage.nbytes() == count * part.itemsize:
            part = part.as_strided((count,), (1,), 0)
        key = (storage._cdata, tensor.dtype) if fills else object()
        copy = self._copies[key] = self._copies.get(key) or _Copy(part)
        copy.uses += 1

        def fetch() -> Tensor:
            self._begin(self)
            self.prefetch()
            if self.before:
                self.before.prefetch()
            return copy.take().as_strided(size, strides, offset) if fills else copy.take().expand(size)

        return fetch


class _Copy:
    """A tensor that is copied to the host, and back on request."""

    def __init__(self, source: Tensor) -> None:
        self.uses = 0  #: How often it will be taken.
        self._source: Tensor | None = source
        self._strides, self._device = source.stride(), source.device
        # Contiguous: torch copies other layouts through pageable memory, and the host waits.
        self._kept = torch.empty(source.size(), dtype=source.dtype, pin_memory=source.device.type == "cuda")
        self._copied = _copy(source, self._kept, source.device, _streams(source.device)[0])
        self._fetched: tuple[Tensor, Any] | None = None

    def prefetch(self) -> None:
        """Start fetching it, unless it is on the device or no longer needed."""
        if self.uses and self._source is None and self._fetched is None:
            self._fetch()

    def take(self) -> Tensor:
        """Return the tensor on its device; it may be overwritten there once the run has left."""
        self.uses -= 1
        if self._source is not None:
            return self._source
        tensor, arrived = self._fetched or self._fetch()
        _now(self._device).wait_event(arrived)
        if self.uses <= 0:
            self._fetched = None
        return tensor

    def leave(self) -> None:
        """Free its device memory, for use after the copies that read or write it."""
        if self._source is not None:
            _now(self._device).wait_event(self._copied)
        elif self._fetched is not None:
            _now(self._device).wait_event(self._fetched[1])
        self._source = self._fetched = None

    def _fetch(self) -> tuple[Tensor, Any]:
        stream = _streams(self._device)[1]
        stream.wait_event(self._copied)
        tensor = torch.empty_strided(self._kept.size(), self._strides, dtype=self._kept.dtype, device=self._device)
        self._fetched = tensor, _copy(self._kept, tensor, self._device, stream)
        return self._fetched


def _copy(source: Tensor, into: Tensor, device: torch.device, stream: Any) -> Any:
    """Copy in ``stream``, after the work queued on the current stream; return an event that marks the end."""
    stream.wait_stream(_now(device))
    with torch.get_device_module(device).stream(stream):
        into.copy_(source, non_blocking=True)
        done = torch.get_device_module(device).Event()
        done.record()
    return done


def _now(device: torch.device) -> Any:
    """Return the stream in which a device computes; a CPU's does nothing, as its copies are synchronous."""
    return torch.get_device_module(device).current_stream()


@cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    return torch.get_device_module(device).Stream(), torch.get_device_module(device).Stream()


def _is_copy(tensor: Tensor) -> bool:
    """Whether a tensor is a weight's narrow copy, as made by :class:`ptdbench.kernels.copies.Copies`."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "_CastWeightsBackward"
