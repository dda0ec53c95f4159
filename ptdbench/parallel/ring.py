"""Ring attention: keys and values of all positions pass each rank, which attends with the queries of its own.

The exchange, its order and the merging of partial results are torch's own (Liu et al. 2023, arXiv 2310.01889), which
torch's ``context_parallel`` applies to DTensors on GPUs. Here they are applied to plain tensors, with the kernels of
the device, a CPU's too. They are private to torch: :func:`missing` says what this version lacks.

Each rank has two pieces of the positions, one from each end (:class:`ptdbench.parallel.positions.Positions`), so that a
causal mask leaves all of them the same number of products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten

#: The dimensions of ``[batch, heads, length, head width]``.
_HEADS, _LENGTH = 1, 2

_OF_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"
_NEEDED = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options")

#: Dtypes of which flash attention has kernels on a GPU; others take memory-efficient attention.
_OF_FLASH = (torch.bfloat16, torch.float16)

#: Queries of a tile of memory-efficient attention, to whole ones of which it pads the log-sum-exp.
_TILE = 32


def missing() -> str | None:
    """What this version of torch lacks; ``None`` if it has all."""
    try:
        module = import_module(_OF_TORCH)
    except ImportError:
        return _OF_TORCH
    return next((f"{_OF_TORCH}.{name}" for name in _NEEDED if not hasattr(module, name)), None)


def attention(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention over the positions of all ranks of a mesh.

    Returns:
        Takes queries, keys and values of a rank's positions, ``[batch, heads, length, head width]``, keys and values
        perhaps of fewer heads, and returns their mixture.
    """

    @torch.compiler.disable
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = _Ring.apply(q, k, v, mesh)  # type: ignore[no-untyped-call]
        return found

    return forward


@dataclass(frozen=True)
class _Kernel:
    """A device's attention, of ``[batch, heads, length, head width]``.

    Attributes:
        forward: Of query, key, value and whether it is causal: the mixture and its log-sum-exp.
        backward: Of the mixture's gradient, query, key, value, mixture, log-sum-exp and whether it is causal: the
            gradients of query, key and value.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    """Sequences of one length and no dropout: what torch asks for of both is empty."""
    none = torch.empty(0, dtype=torch.int64)
    lengths = query.shape[_LENGTH], key.shape[_LENGTH]
    return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, out, lse, None, None, *lengths, 0.0, is_causal, none, none
    )


def _efficient(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Its log-sum-exp is padded to whole tiles, which a ring that merges halves of it does not expect."""
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal)
    return out, lse[..., : query.shape[_LENGTH]]


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    none, wanted = torch.empty(0, dtype=torch.int64), [True, True, True, False]
    padded = F.pad(lse, (0, -lse.shape[-1] % _TILE), value=math.inf)
    return aten._scaled_dot_product_efficient_attention_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, None, out, padded, none, none, 0.0, wanted, is_causal
    )


_CPU = _Kernel(
    forward=lambda *qkv_causal: aten._scaled_dot_product_flash_attention_for_cpu(*qkv_causal[:3], 0.0, qkv_causal[3]),
    backward=lambda *given: aten._scaled_dot_product_flash_attention_for_cpu_backward(*given[:-1], 0.0, given[-1]),
)
_FLASH = _Kernel(
    forward=lambda *given: aten._scaled_dot_product_flash_attention(*given[:3], 0.0, given[3])[:2],
    backward=_flash_backward,
)
_EFFICIENT = _Kernel(forward=_efficient, backward=_efficient_backward)


def _kernel(query: Tensor) -> _Kernel:
    if query.device.type == "cpu":
        return _CPU
    return _FLASH if query.dtype in _OF_FLASH else _EFFICIENT


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
        groups = q.shape[_HEADS] // k.shape[_HEADS]

        def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
            return _kernel(q).forward(query, _repeated(key, groups), _repeated(value, groups), is_causal)

        ring = _balanced()._templated_ring_attention
        out, logsumexp = ring(mesh.get_group(), _LENGTH, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.mesh = mesh
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        groups = q.shape[_HEADS] // k.shape[_HEADS]

        def attend(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, gradient: Tensor
        ) -> tuple[Tensor, ...]:
            whole = _repeated(key, groups), _repeated(value, groups)
            found = _kernel(q).backward(gradient, query, *whole, out, logsumexp, is_causal)
            return found[0], _summed(found[1], groups), _summed(found[2], groups)

        ring = _balanced()._templated_ring_attention_backward
        group, gradient = ctx.mesh.get_group(), gradients[0].contiguous()
        found = ring(group, _LENGTH, attend, gradient, "gradient", q, k, v, out, logsumexp, is_causal=True)
        return (*found[:3], None)


def _balanced() -> ModuleType:
    """Torch's ring, for two pieces of the positions a rank."""
    module = import_module(_OF_TORCH)
    module._cp_options.enable_load_balance = True
    return module


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    """Each head of keys or values for ``groups`` heads of queries."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, _HEADS)


def _summed(gradient: Tensor, groups: int) -> Tensor:
    """The gradient of what was repeated."""
    return gradient if groups == 1 else gradient.unflatten(_HEADS, (-1, groups)).sum(_HEADS + 1)
