"""Activations of the layers between the forward and the backward pass: kept, recomputed, or offloaded to the host."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ptdbench.local_part import plain_tensors, without_repeats
from ptdbench.models.protocol import wrap_forward
from ptdbench.models.state import ModuleState, has_state
from ptdbench.problems import at_least, require


class Activations:
    """The type of ``activations=<choice>``."""

    after_compilation = False  #: Whether it is applied to compiled layers; otherwise the compiler sees it.

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply to these layers, in place."""


@dataclass(frozen=True)
class Keep(Activations):
    """Keep what the backward pass needs."""


@dataclass(frozen=True)
class Recompute(Activations):
    """Keep only a layer's input, and run the layer again in the backward pass (activation checkpointing).

    Raises:
        ConfigError: ``every`` is less than 1.
    """

    every: int = 1  #: Recompute layers 0, ``every``, 2 ``every``, ... of a model or stage; the others keep theirs.

    def __post_init__(self) -> None:
        require(*at_least(1, every=self.every))

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply activation checkpointing to these layers."""
        for layer in layers[:: self.every]:
            _recompute(layer)


@dataclass(frozen=True)
class Selective(Activations):
    """Keep a layer's input and the results of its expensive operations, :data:`EXPENSIVE`, and recompute the rest.

    Raises:
        ConfigError: ``products`` is less than 1.
    """

    products: int = 1  #: Keep the result of every n-th matrix product; 2 in torchtitan.

    def __post_init__(self) -> None:
        require(*at_least(1, products=self.products))

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply selective activation checkpointing to these layers."""
        if all(type(layer).__module__.startswith("ptdbench.") for layer in layers):
            # If compiled, torch warns that in-place operations must not be recomputed: these layers have none.
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        for layer in layers:
            _recompute(layer, partial(_selecting, self.products))


@dataclass(frozen=True)
class Offload(Activations):
    """Move a layer's saved tensors to host memory while the next layer runs, and fetch them for the backward pass."""

    after_compilation = True  # hooks see what a graph saves for autograd, not what happens inside it

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply activation offloading to these layers."""
        offloading = _Offloading()
        for number, layer in enumerate(layers):
            wrap_forward(layer, partial(offloading.of_layer, layer, number == 0))


_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

#: Products of two matrices, which ``activations.products`` counts.
PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.linear, _aten._scaled_mm})

#: Operations whose results ``activations=selective`` keeps: matrix products, convolutions, all attention kernels, and
#: reductions over ranks. This is torchtitan's list, plus products of experts and the corresponding operations on a CPU.
EXPENSIVE = frozenset({
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten._scaled_mm, _aten._grouped_mm,
    _aten.convolution, _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention, _aten._scaled_dot_product_fused_attention_overrideable,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _c10d.all_reduce, _c10d.reduce_scatter_tensor, _c10d.all_to_all_single,
})  # fmt: skip

#: Contexts for the first run of a layer, and for its recomputation.
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _selecting(products: int) -> _Contexts:
    """Return contexts that keep the results of expensive operations, but of matrix products one in ``products``."""
    seen: Counter[bool] = Counter()  # in the first run of a layer, and in its recomputation

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kind, is_kept = getattr(operation, "overloadpacket", operation), True
        if kind in PRODUCTS:
            is_kept = seen[context.is_recompute] % products == 0
            seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_kept and kind in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recompute(layer: nn.Module, contexts: Callable[[], _Contexts] = noop_context_fn) -> None:
    """Let a layer recompute under the second of ``contexts``, with the buffers and attributes of its first run.

    A compiled layer repeats operations of its graph, not Python code; the specification of a run checks that it changes
    no buffers but batch norm statistics, which it does not read.
    """

    def keeping_state() -> _Contexts:
        first, second = contexts()
        return first, _replayed(ModuleState(layer), second)

    def wrapper(forward: Callable[..., Any]) -> Callable[..., Any]:
        checkpointed = partial(checkpoint, forward, use_reentrant=False)
        # The compiler does not recognize the default if it is passed explicitly.
        plain = checkpointed if contexts is noop_context_fn else partial(checkpointed, context_fn=contexts)
        eager = partial(checkpointed, context_fn=keeping_state)

        def run(*arguments: Any, **named: Any) -> Any:
            return (plain if torch.compiler.is_compiling() else eager)(*arguments, **named)

        return run if has_state(layer) else plain

    wrap_forward(layer, wrapper)


@contextmanager
def _replayed(state: ModuleState, context: AbstractContextManager[Any]) -> Iterator[None]:
    with state.replayed(), context:
        yield


class _Offloading:
    """Offloads the saved tensors of the layers of a model, or of one of its stages.

    A GPU copies in two streams, one per direction. While it computes a layer, in either pass, the device holds the
    saved tensors of that layer, in use, and of the layer before it, in flight. All copies but the first of a backward
    pass therefore overlap with compute, if computing a layer takes at least as long.
    """

    def __init__(self) -> None:
        self._latest: _Run | None = None
        self._on_device: list[_Run] = []

    def of_layer(self, layer: nn.Module, is_first: bool, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward`` of a layer."""

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
        is_copy = whole.grad_fn is not None and whole.grad_fn.name() == "_CastWeightsBackward"  # of kernels.copies
        if is_copy or self._is_of_weight(tensor):
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
        part, storage = without_repeats(tensor), tensor.untyped_storage()
        count = part.numel()
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
